"""`attention`: softmax attention of queries over tokens, by fused kernels in training on CUDA, else by torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.nn.triton_here import triton_installed


def attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b m h e"]:
    """Attention over the real tokens of every row; a row without any gives NaN, as torch's does."""
    if dropout == 0.0 and _trained_on_cuda(q, keys, values):
        function: Any = FusedAttention
        result: Tensor = function.apply(q, keys, values, mask)
        return result
    chosen = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=chosen, dropout_p=dropout
    )
    return out.transpose(1, 2)


def _trained_on_cuda(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    if not (q.is_cuda and torch.is_grad_enabled()) or torch.compiler.is_compiling() or not triton_installed():
        return False
    same = q.dtype == keys.dtype == values.dtype
    return same and q.dtype in (torch.float32, torch.bfloat16, torch.float16) and q.shape[-1] <= 128 and q.numel() > 0


class FusedAttention(torch.autograd.Function):
    """Attention with gradients for queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """One launch; keeps the log of every query's sum."""
        from retreever.nn.attention_kernel import QUERIES, attend

        q, keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, keys, values))
        mask = None if mask is None else mask.contiguous()
        b, m, h, _ = q.shape
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(b, h, m, dtype=torch.float32)
        attend[(-(-m // QUERIES), b * h)](q, keys, values, mask, out, lse, **_shared(q, keys, values, mask))
        ctx.save_for_backward(q, keys, values, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two launches: queries, then keys and values."""
        from retreever.nn.attention_kernel import KEYS, QUERIES, key_value_gradient, query_gradient

        q, keys, values, mask, out, lse = ctx.saved_tensors
        b, m, h, _ = q.shape
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        grads = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, keys, values)]
        shared = _shared(q, keys, values, mask)
        query_gradient[(-(-m // QUERIES), b * h)](q, keys, values, mask, out, lse, grad, grads[0], delta, **shared)
        key_value_gradient[(-(-keys.shape[1] // KEYS), b * h)](
            q, keys, values, mask, lse, grad, delta, *grads[1:], **shared
        )
        return *grads, None


def _shared(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Arguments all kernels take; strides are in elements."""
    from retreever.nn.attention_kernel import KEYS, LOG2E, QUERIES
    from retreever.nn.product_kernel import precision

    e = q.shape[-1]
    strides = {
        f"{name}{axis}": part.stride(i)
        for name, axes, part in (("q", "bmh", q), ("k", "bnh", keys), ("v", "bnh", values))
        for i, axis in enumerate(axes)
    }
    return strides | {
        "m": q.shape[1], "n": keys.shape[1], "scale": e**-0.5 * LOG2E, "heads": q.shape[2],
        "E": e, "WIDTH": max(16, 1 << (e - 1).bit_length()), "HAS_MASK": mask is not None,
        "PRECISION": precision(q.dtype), "BM": QUERIES, "BN": KEYS, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
