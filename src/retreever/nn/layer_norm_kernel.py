"""Layer norm with its gradients in Triton, for training on CUDA.

Tokens here are narrow (64 numbers) and many. torch's kernels give a block to every row and another pass to the
gradients of weight and bias; these take many rows at once and sum those gradients on the way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST, PROGRAMS = 1024, 264  # two programs for each multiprocessor of a large GPU


@triton.jit(do_not_specialize=["count"])
def norm_rows(x, weight, bias, out, stats, count, eps, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of the norm; keeps mean and reciprocal deviation of each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < D)[None, :]
    cells = row[:, None] * D + column[None, :]
    tokens = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tokens, axis=1) / D
    centred = tl.where((column < D)[None, :], tokens - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    result = centred * scale[:, None] * w[None, :] + b[None, :]
    tl.store(out + cells, result.to(out.dtype.element_ty), mask=inside)
    tl.store(stats + 2 * row, mean, mask=row < count)
    tl.store(stats + 2 * row + 1, scale, mask=row < count)


@triton.jit(do_not_specialize=["count", "share"])
def norm_gradients(
    grad, x, weight, stats, grad_x, sums, count, share, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of `share` rows, and their part of the gradients of weight and bias."""
    program, column = tl.program_id(0), tl.arange(0, WIDTH)
    real = column < D
    w = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    weight_sum, bias_sum = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, share, ROWS):
        row = program.to(tl.int64) * share + start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & real[None, :]
        cells = row[:, None] * D + column[None, :]
        g = tl.load(grad + cells, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(stats + 2 * row, mask=row < count, other=0.0)
        scale = tl.load(stats + 2 * row + 1, mask=row < count, other=0.0)
        tokens = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, (tokens - mean[:, None]) * scale[:, None], 0.0)
        along = tl.sum(g * w[None, :] * normed, axis=1) / D
        level = tl.sum(g * w[None, :], axis=1) / D
        result = (g * w[None, :] - level[:, None] - normed * along[:, None]) * scale[:, None]
        tl.store(grad_x + cells, result.to(grad_x.dtype.element_ty), mask=inside)
        weight_sum += tl.sum(g * normed, axis=0)
        bias_sum += tl.sum(g, axis=0)
    tl.store(sums + 2 * program * D + column, weight_sum, mask=real)
    tl.store(sums + (2 * program + 1) * D + column, bias_sum, mask=real)


class FusedLayerNorm(torch.autograd.Function):
    """F.layer_norm over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """One launch."""
        x = x.contiguous()
        count, d = x.numel() // x.shape[-1], x.shape[-1]
        out, stats = torch.empty_like(x), torch.empty(count, 2, device=x.device)
        width = triton.next_power_of_2(d)
        rows = max(1, 2048 // width)
        norm_rows[(triton.cdiv(count, rows),)](x, weight, bias, out, stats, count, eps, d, width, rows, num_warps=4)
        ctx.save_for_backward(x, weight, stats)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """One launch, and the sum of what each program found for weight and bias."""
        x, weight, stats = ctx.saved_tensors
        count, d = x.numel() // x.shape[-1], x.shape[-1]
        width = triton.next_power_of_2(d)
        rows = max(1, 2048 // width)
        share = triton.cdiv(triton.cdiv(count, PROGRAMS), rows) * rows
        programs = triton.cdiv(count, share)
        grad_x, sums = torch.empty_like(x), torch.empty(programs, 2, d, device=x.device)
        norm_gradients[(programs,)](
            grad.contiguous(), x, weight, stats, grad_x, sums, count, share, d, width, rows, num_warps=4
        )
        grad_weight, grad_bias = sums.sum(dim=0).to(weight.dtype).unbind()
        return grad_x, grad_weight, grad_bias, None


def fits(x: Tensor) -> bool:
    """Whether the kernels take it."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and 0 < x.shape[-1] <= WIDEST and x.numel() > 0
