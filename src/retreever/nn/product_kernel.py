"""Matrix products inside Triton kernels, in the precision the user asks torch for."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl


def precision(dtype: torch.dtype) -> str:
    """Products of float32 keep float32 accuracy (three passes of tf32) unless the user allows tf32."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


@triton.jit
def nearest(x):
    """Float32 rounded to the nearest tf32; left alone, tensor cores cut the last thirteen bits off, towards zero."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b of float32 matrices."""
    if PRECISION == "tf32":
        return tl.dot(nearest(a), nearest(b), input_precision="tf32")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def times(x, weight, rows, columns, stride, PRECISION: tl.constexpr):
    """x @ W for rows `rows` and columns `columns` of W."""
    return product(x, tl.load(weight + rows[:, None] * stride + columns[None, :]), PRECISION)


@triton.jit
def times_transposed(x, weight, rows, columns, stride, PRECISION: tl.constexpr):
    """x @ W.T for rows `columns` of a torch Linear weight W (out, in), whose inputs are `rows`."""
    return product(x, tl.load(weight + columns[None, :] * stride + rows[:, None]), PRECISION)
