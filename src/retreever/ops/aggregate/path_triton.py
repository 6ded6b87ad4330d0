"""Triton kernel of one way up a tree: all nodes above changed leaves that lie side by side, in a single launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.kernels_triton import summarise
from retreever.ops.aggregate.steps import steps_of
from retreever.ops.aggregate.way_triton import is_real, put_token
from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.launching_triton import Launcher, on_device_of, precision
from retreever.tree.plan import TreePlan

ROWS = 16  # of a tile, the fewest that tensor cores take
WARPS = 4  # of a program: levels wait for one another, so more warps only help if a tile's products fill them
SIZES = ["rows", "slot_stride", "real_stride", "width", "first_child", "first_parent", "parents", "depth"]


@triton.jit(do_not_specialize=SIZES)
def climb_path(
    nodes, mask, slots, norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    count, tokens, real, powers, offsets,
    rows, slot_stride, real_stride, width, first_child, first_parent, parents, depth,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute all nodes above `width` leaf slots of one row of the batch, whose parents fit into one tile.

    `nodes` (b, rows, D), `mask` (b, rows) and `count` (b, rows) are dense. With `tokens` (b, D) and a width of 1, the
    token is first put on its leaf, with the counts and masks of all nodes above; otherwise these are already written.
    """
    batch = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + batch * slot_stride)
    if tokens is not None:
        now = is_real(real, batch * real_stride)
        put_token(nodes, mask, count, tokens + batch * D, slot, now, powers, offsets, batch * rows, depth, D, LEVELS)
        tl.debug_barrier()  # as below
    first = batch * parents + slot // CHILDREN
    last = batch * parents + tl.load(slots + batch * slot_stride + width - 1) // CHILDREN
    total_parents = tl.num_programs(0) * parents
    rows = batch * 0 + rows  # of 64 bits, as its product with D may be
    for _ in range(depth):
        summarise(
            nodes, mask, rows * D, rows, first_child, first_parent, parents, first, last - first + 1, total_parents,
            norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
            CHILDREN, HEADS, D, HIDDEN, PRE, SCALE, PRECISION, ROWS,
        )  # fmt: skip
        tl.debug_barrier()  # the next level reads what other threads of this program wrote
        first = first // CHILDREN
        last = last // CHILDREN
        total_parents = total_parents // CHILDREN
        parents = parents // CHILDREN
        first_child, first_parent = first_parent, first_parent - parents


_climb = Launcher(climb_path)


def climb_triton(
    nodes: Tensor,
    mask: Tensor,
    slots: Tensor,
    plan: TreePlan,
    weights: LayerWeights,
    count: Tensor | None = None,
    tokens: Tensor | None = None,
    real: Tensor | None = None,
) -> None:
    """Write the nodes (b, t, d) above leaf `slots` (b, w), which follow one another, in place.

    With dense `tokens` (b, 1, d) these are first put on the slots, with counts and masks; without `real` all are real.
    """
    dim, heads = nodes.shape[2], weights.heads
    rows = max(ROWS, triton.next_power_of_2(2 * plan.branch))
    way = (plan.leaf_offset, plan.offsets[plan.depth], plan.blocks, plan.depth)
    sizes = (plan.nodes, slots.stride(0), 0 if real is None else real.stride(0), slots.shape[1], *way)
    layer = (heads, dim, weights.hidden, weights.pre, (dim // heads) ** -0.5, precision(nodes.dtype))
    constants = (plan.branch, *layer, rows, triton.next_power_of_2(plan.depth + 1))
    steps = (None, None) if tokens is None else steps_of(plan, nodes.device)
    with on_device_of(nodes):
        tensors = (nodes, mask, slots, *weights.tensors, count, tokens, real, *steps)
        _climb(len(nodes), tensors, sizes, constants, num_warps=WARPS, num_stages=1)
