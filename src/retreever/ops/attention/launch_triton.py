"""Softmax attention with gradients on CUDA tensors: custom operators that launch the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.ops.attention.kernels_triton import KEYS, LOG2E, QUERIES, attend, key_value_gradient, query_gradient
from retreever.ops.gradients import refuse_second_derivatives
from retreever.ops.launching_triton import on_device_of, precision


def attention_triton(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None,
) -> Float[Tensor, "b m h e"]:
    """Attention over the real tokens of every row."""
    return _forward(q, keys, values, mask)[0]


@torch.library.custom_op("retreever::attention_triton", mutates_args=())
def _forward(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of every query and head, which the gradients need."""
    q, keys, values, mask = _dense(q, keys, values, mask)
    b, m, h, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(b, h, m, dtype=torch.float32)
    with on_device_of(q):
        attend[(-(-m // QUERIES), b * h)](q, keys, values, mask, out, lse, **_shared(q, keys, values, mask))
    return out, lse


@_forward.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    b, m, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, h, m, dtype=torch.float32)


@torch.library.custom_op("retreever::attention_triton_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and values, in two launches."""
    q, keys, values, mask = _dense(q, keys, values, mask)
    b, m, h, _ = q.shape
    grad, out, delta = grad.contiguous(), out.contiguous(), torch.empty_like(lse)
    d_q, d_keys, d_values = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, keys, values))
    shared = _shared(q, keys, values, mask)
    with on_device_of(q):
        query_gradient[(-(-m // QUERIES), b * h)](q, keys, values, mask, out, lse, grad, d_q, delta, **shared)
        key_value_gradient[(-(-keys.shape[1] // KEYS), b * h)](
            q, keys, values, mask, lse, grad, delta, d_keys, d_values, **shared
        )
    return d_q, d_keys, d_values


@_backward.register_fake
def _(grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(_backward, "triton")


def _dense(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors with their last axis dense, as the kernels need it."""
    return tuple(x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _shared(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Arguments all kernels take; strides are in elements."""
    e = q.shape[-1]
    strides = {
        f"{name}{axis}": part.stride(i)
        for name, axes, part in (("q", "bmh", q), ("k", "bnh", keys), ("v", "bnh", values))
        for i, axis in enumerate(axes)
    }
    return strides | {
        "m": q.shape[1], "n": keys.shape[1], "scale": e**-0.5 * LOG2E, "heads": q.shape[2],
        "mask_stride": 0 if mask is None else mask.stride(0),
        "E": e, "WIDTH": max(16, 1 << (e - 1).bit_length()), "HAS_MASK": mask is not None,
        "PRECISION": precision(q.dtype), "BM": QUERIES, "BN": KEYS, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
