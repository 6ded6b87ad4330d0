"""Triton kernels of the keys and values of nodes: layer norm and projection in one pass over memory.

Inference only. torch's layer norm of rows as short as a token takes longer than all else in a tree of means.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.kernels_triton import normalise, project
from retreever.ops.aggregate.steps import steps_of
from retreever.ops.aggregate.way_triton import way_up, write_logs
from retreever.ops.aggregate.weights import ProjectionWeights
from retreever.ops.launching_triton import Launcher, on_device_of, precision
from retreever.tree.plan import TreePlan

ROWS, COLUMNS = 64, 64
WAY_COLUMNS, FEWEST_LEVELS = 32, 16  # of one way: columns of a program, and rows, the fewest that tensor cores take


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


@triton.jit(do_not_specialize=["rows", "depth", "slot_stride", "key_batch", "key_row", "value_batch", "value_row"])
def norm_project_way(
    nodes, keys, values, count, logs, counted, slots, powers, offsets, norm_w, norm_b, weight,
    rows, depth, slot_stride, key_batch, key_row, value_batch, value_row,
    D: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS of the keys, or of the values, of one leaf of a row of the batch and of all nodes above it.

    A key has WIDTH numbers, E of every head. Where there are log counts (`logs`, `counted`), these are written too.
    """
    PARTS: tl.constexpr = 2 * WIDTH // COLUMNS
    batch, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    slot = tl.load(slots + batch * slot_stride)
    row, inside = way_up(slot, powers, offsets, depth, LEVELS)
    node, there = batch * rows + row, inside[:, None]
    column = tl.arange(0, D)
    x = tl.load(nodes + node[:, None] * D + column[None, :], mask=there, other=0.0).to(tl.float32)
    normed = normalise(x, tl.load(norm_w + column), tl.load(norm_b + column), D)
    unit = part * COLUMNS + tl.arange(0, COLUMNS)  # of keys, then of values
    found = project(normed, weight, column, unit, D, PRECISION).to(keys.dtype.element_ty)
    if part < PARTS // 2:
        tl.store(keys + batch * key_batch + row[:, None] * key_row + unit[None, :], found, mask=there)
        if logs is not None:
            total = tl.load(count + node, mask=inside, other=0)
            write_logs(logs, counted, node, total, found, unit, inside & (part == 0), there, WIDTH, E)
    else:
        tl.store(values + batch * value_batch + row[:, None] * value_row + (unit - WIDTH)[None, :], found, mask=there)


_project, _project_way = Launcher(norm_project), Launcher(norm_project_way)


def project_triton(x: Tensor, weights: ProjectionWeights) -> Tensor:
    """Keys and values side by side, (b, t, 2 * dim), of dense x (b, t, d)."""
    width, d = weights.to_kv.shape
    output = x.new_empty(*x.shape[:2], width)
    rows = x.shape[0] * x.shape[1]
    constants = (d, width, precision(x.dtype), ROWS, min(COLUMNS, width))
    with on_device_of(x):
        _project(-(-rows // ROWS), (x, *weights, output), (rows,), constants, num_warps=4)
    return output


def project_way_triton(
    nodes: Tensor,
    pair: tuple[Tensor, Tensor],
    count: Tensor,
    logs: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    plan: TreePlan,
    weights: ProjectionWeights,
) -> None:
    """Write keys and values (`pair`) of leaf `slots` (b, 1) and of all nodes above them, in place, with log counts."""
    b, rows, h, e = pair[0].shape
    columns = min(WAY_COLUMNS, h * e)
    sizes = (rows, plan.depth, slots.stride(0), *(stride for part in pair for stride in part.stride()[:2]))
    levels = max(FEWEST_LEVELS, triton.next_power_of_2(plan.depth + 1))
    constants = (nodes.shape[2], h * e, e, precision(nodes.dtype), levels, columns)
    with on_device_of(nodes):
        tensors = (nodes, *pair, count, *logs, slots, *steps_of(plan, nodes.device), *weights)
        _project_way(b * 2 * h * e // columns, tensors, sizes, constants, num_warps=4)
