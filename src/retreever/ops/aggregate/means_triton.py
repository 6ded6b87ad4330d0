"""Triton kernel of one way up a tree of means: counts, masks, keys and values of all nodes above a changed leaf.

No level waits for the one below it: the sum of a node is that of its leaf and of the siblings of all nodes on the way
up to it, so all siblings are read at once and added up along the way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.steps import steps_of
from retreever.ops.aggregate.way_triton import is_real, way_up, write_logs
from retreever.ops.launching_triton import Launcher, on_device_of
from retreever.tree.plan import TreePlan

COLUMNS = 64  # numbers of a key, and of its value, that one program takes
SIZES = ["rows", "depth", "parts", "slot_stride", "real_stride", "key_batch", "key_row", "value_batch", "value_row",
         "new_key_stride", "new_value_stride"]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def climb_means(
    keys, values, count, mask, logs, counted, slots, real, new_keys, new_values, powers, offsets,
    rows, depth, parts, slot_stride, real_stride, key_batch, key_row, value_batch, value_row, new_key_stride,
    new_value_stride, BRANCH: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put a key and a value on one leaf slot of a row of the batch, and write the means of all nodes above it.

    `parts` programs share a row, each with COLUMNS of the WIDTH numbers of keys and values; E belong to a head. They do
    not wait for one another: none reads what another writes. `logs` and `counted` are None in trees without them.
    """
    batch, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    slot = tl.load(slots + batch * slot_stride)
    now = is_real(real, batch * real_stride)
    level, column = tl.arange(0, LEVELS), part * COLUMNS + tl.arange(0, COLUMNS)
    row, inside = way_up(slot, powers, offsets, depth, LEVELS)
    upper = inside & (level > 0)
    own = slot // tl.load(powers + level - 1, mask=upper, other=1)  # place of the child on the way
    first = (own // BRANCH) * BRANCH + tl.load(offsets + level - 1, mask=upper, other=0)  # row of the first child
    wide = column[None, :] < WIDTH
    leaf = (level == 0)[:, None] & wide & (now > 0)
    key = tl.load(new_keys + batch * new_key_stride + column[None, :], mask=leaf, other=0.0).to(tl.float32)
    value = tl.load(new_values + batch * new_value_stride + column[None, :], mask=leaf, other=0.0).to(tl.float32)
    total = tl.where(level == 0, now, 0)
    for step in range(1, BRANCH):
        child = first + (own + step) % BRANCH
        number = tl.load(count + batch * rows + child, mask=upper, other=0)
        total += number
        filled = (number > 0)[:, None] & wide  # padding may hold anything
        at = child[:, None] * key_row + column[None, :]
        key += number[:, None] * tl.load(keys + batch * key_batch + at, mask=filled, other=0.0).to(tl.float32)
        at = child[:, None] * value_row + column[None, :]
        value += number[:, None] * tl.load(values + batch * value_batch + at, mask=filled, other=0.0).to(tl.float32)
    total = tl.cumsum(total, axis=0)
    divisor = tl.maximum(total, 1).to(tl.float32)[:, None]
    stored = (tl.cumsum(key, axis=0) / divisor).to(keys.dtype.element_ty)
    there = inside[:, None] & wide
    tl.store(keys + batch * key_batch + row[:, None] * key_row + column[None, :], stored, mask=there)
    at = row[:, None] * value_row + column[None, :]
    value = tl.cumsum(value, axis=0) / divisor
    tl.store(values + batch * value_batch + at, value.to(values.dtype.element_ty), mask=there)
    node, counts_too = batch * rows + row, inside & (part == 0)
    tl.store(count + node, total, mask=counts_too)
    tl.store(mask + node, total > 0, mask=counts_too)
    if logs is not None:
        write_logs(logs, counted, node, total, stored, column, counts_too, there, WIDTH, E)


_climb = Launcher(climb_means)


def climb_means_triton(
    nodes: tuple[Tensor, Tensor],
    count: Tensor,
    mask: Tensor,
    logs: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    real: Tensor | None,
    leaves: tuple[Tensor, Tensor],
    plan: TreePlan,
) -> None:
    """Put keys and values `leaves` (b, h, e) on `slots` (b), and write all nodes above them in place.

    Numbers of a node lie side by side (`lies_dense`); without `real` all tokens are.
    """
    b, rows, h, e = nodes[0].shape
    columns = min(COLUMNS, triton.next_power_of_2(h * e))
    parts = -(-h * e // columns)
    strides = [stride for part in nodes for stride in part.stride()[:2]] + [part.stride(0) for part in leaves]
    sizes = (rows, plan.depth, parts, slots.stride(0), 0 if real is None else real.stride(0), *strides)
    constants = (plan.branch, h * e, e, triton.next_power_of_2(plan.depth + 1), columns)
    with on_device_of(count):
        tensors = (*nodes, count, mask, *logs, slots, real, *leaves, *steps_of(plan, count.device))
        _climb(b * parts, tensors, sizes, constants, num_warps=4)
