"""Triton kernel of the keys and values of all nodes: layer norm and projection in one pass over memory.

Inference only. torch's layer norm of rows as short as a token takes longer than all else in a tree of means.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.kernels_triton import normalise, project
from retreever.ops.aggregate.weights import ProjectionWeights
from retreever.ops.launching_triton import on_device_of, precision

ROWS, COLUMNS = 64, 64


@triton.jit(do_not_specialize=["rows"])
def norm_project(
    x, norm_w, norm_b, weight, output, rows, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(rows, WIDTH): LN(x) @ weight.T for dense x (rows, D)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    inside = (row < rows)[:, None]
    tile = tl.load(x + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    normed = normalise(tile, tl.load(norm_w + column), tl.load(norm_b + column), D)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        unit = start + tl.arange(0, COLUMNS)
        part = project(normed, weight, column, unit, D, PRECISION)
        tl.store(output + row[:, None] * WIDTH + unit[None, :], part.to(output.dtype.element_ty), mask=inside)


def project_triton(x: Tensor, weights: ProjectionWeights) -> Tensor:
    """Keys and values side by side, (b, t, 2 * dim), of dense x (b, t, d)."""
    width, d = weights.to_kv.shape
    output = x.new_empty(*x.shape[:2], width)
    rows = x.shape[0] * x.shape[1]
    with on_device_of(x):
        norm_project[(-(-rows // ROWS),)](
            x, *weights, output, rows, d, width, precision(x.dtype), ROWS, min(COLUMNS, width), num_warps=4
        )
    return output
