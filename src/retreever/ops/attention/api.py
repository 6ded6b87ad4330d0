"""`attention`: softmax attention of queries over tokens.

Training on CUDA runs our Triton kernel, everything else torch's attention. The reference is two matrix products: any
dtype and device, second derivatives, torch.func.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.ops.backend import Impl, choose, transformed
from retreever.ops.gradients import needs_gradient

# Up to this many query-key pairs per row, sums of products are faster than attention kernels for long sequences.
FEW = 16
WIDEST = 128  # largest head width of the kernel


def attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None = None,
    dropout: float = 0.0,
    impl: Impl = "auto",
) -> Float[Tensor, "b m h e"]:
    """Attention over the real tokens of every row; a row without any gives NaN, as in torch."""
    pairs = q.shape[1] * keys.shape[1]
    if isinstance(pairs, int) and pairs <= FEW:  # not where an exported program takes any number of queries
        return attend_few(q, keys, values, mask, dropout)
    if impl == "reference" or transformed():  # the fused one has no batching rule on a CPU
        return attention_reference(q, keys, values, mask, dropout)
    if choose("attention", impl, q) == "triton" and _trains(q, keys, values, dropout):
        from retreever.ops.attention.launch_triton import attention_triton

        return attention_triton(q, keys, values, mask)
    attn_mask = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=attn_mask, dropout_p=dropout
    )
    return out.transpose(1, 2)


def _trains(q: Tensor, keys: Tensor, values: Tensor, dropout: float) -> bool:
    """Whether the training kernel can run: some input requires a gradient, and there is no dropout."""
    return (
        needs_gradient(q, keys, values)
        and dropout == 0
        and q.dtype == keys.dtype == values.dtype
        and q.shape[-1] <= WIDEST
        and q.numel() > 0
        and not transformed()
    )


def attention_reference(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None,
    dropout: float,
) -> Float[Tensor, "b m h e"]:
    """Attention by two matrix products."""
    scores = (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5  # (b, h, m, n)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights @ values.transpose(1, 2)).transpose(1, 2)


def attend_few(
    q: Float[Tensor, "g m h e"],
    keys: Float[Tensor, "g n h e"],
    values: Float[Tensor, "g n h e"],
    mask: Bool[Tensor, "g n"] | None,
    dropout: float,
) -> Float[Tensor, "g m h e"]:
    """Attention of a few queries to a few tokens, for very many rows at once, by sums of products."""
    scores = (q[:, :, None] * keys[:, None]).sum(dim=-1) * q.shape[-1] ** -0.5  # (g, m, n, h)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, :, None], -math.inf)
    weights = F.dropout(scores.softmax(dim=2), dropout)
    return (weights[..., None] * values[:, None]).sum(dim=2)
