"""Layer norm and linear layer in one Triton kernel, for inference on CUDA: one pass over memory instead of two."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from retreever.nn.product_kernel import precision

ROWS, COLUMNS = 64, 64


@triton.jit
def normalise(x, weight, bias, D: tl.constexpr):
    """Layer norm of the rows of x."""
    mean = tl.sum(x, axis=1) / D
    centred = x - mean[:, None]
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + 1e-5)
    return centred * scale[:, None] * weight[None, :] + bias[None, :]


@triton.jit
def project(x, weight, rows, columns, row_stride, PRECISION: tl.constexpr):
    """x @ W.T for rows `columns` of a torch Linear weight W (out, in), whose inputs are `rows`."""
    w = tl.load(weight + columns[None, :] * row_stride + rows[:, None])
    return tl.dot(x.to(w.dtype), w, input_precision=PRECISION)


@triton.jit(do_not_specialize=["count"])
def norm_linear_rows(
    x, norm_w, norm_b, weight, bias, out, count, row_stride, OUT: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of out = LN(x) @ W.T + b."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    inside = row < count
    tokens = tl.load(x + row[:, None] * row_stride + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    normed = normalise(tokens, tl.load(norm_w + column), tl.load(norm_b + column), D)
    for start in range(0, OUT, COLUMNS):
        unit = start + tl.arange(0, COLUMNS)
        result = project(normed, weight, column, unit, D, PRECISION)
        if bias is not None:
            result += tl.load(bias + unit)[None, :]
        cells = out + row[:, None] * OUT + unit[None, :]
        tl.store(cells, result.to(out.dtype.element_ty), mask=inside[:, None])


def fits(x: Tensor, linear: nn.Linear) -> bool:
    """Whether the kernel can do this layer: sizes that fill tensor-core tiles, rows that lie side by side."""
    d, out = linear.in_features, linear.out_features
    dense = x.is_contiguous() and x.dtype == linear.weight.dtype
    whole = d & (d - 1) == 0 and 16 <= d <= 128 and out % COLUMNS == 0
    return dense and whole and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def norm_linear_fused(x: Tensor, norm: nn.LayerNorm, linear: nn.Linear) -> Tensor:
    """linear(norm(x)) in one launch."""
    out = x.new_empty(*x.shape[:-1], linear.out_features)
    count = x.numel() // linear.in_features
    norm_linear_rows[(-(-count // ROWS),)](
        x, norm.weight, norm.bias, linear.weight, linear.bias, out, count, linear.in_features,
        linear.out_features, linear.in_features, precision(x.dtype), ROWS, COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
