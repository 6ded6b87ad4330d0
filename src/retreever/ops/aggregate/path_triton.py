"""Triton kernel of one way up a tree: all nodes above changed leaves that lie side by side, in a single launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.kernels_triton import summarise
from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.launching_triton import Launcher, on_device_of, precision
from retreever.tree.plan import TreePlan

ROWS = 16  # of a tile, the fewest that tensor cores take


@triton.jit(do_not_specialize=["rows", "slot_stride", "width", "first_child", "first_parent", "parents", "steps"])
def climb_path(
    nodes, mask, slots, norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    rows, slot_stride, width, first_child, first_parent, parents, steps,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute all nodes above `width` leaf slots of one row of the batch, whose parents fit into one tile.

    `nodes` (b, rows, D) and `mask` (b, rows) are dense.
    """
    batch = tl.program_id(0).to(tl.int64)
    first = batch * parents + tl.load(slots + batch * slot_stride) // CHILDREN
    last = batch * parents + tl.load(slots + batch * slot_stride + width - 1) // CHILDREN
    total_parents = tl.num_programs(0) * parents
    rows = batch * 0 + rows  # of 64 bits, as its product with D may be
    for _ in range(steps):
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


def climb_triton(nodes: Tensor, mask: Tensor, slots: Tensor, plan: TreePlan, weights: LayerWeights) -> None:
    """Write the nodes (b, t, d) above leaf `slots` (b, w), which follow one another, in place."""
    dim, heads = nodes.shape[2], weights.heads
    rows = max(ROWS, triton.next_power_of_2(2 * plan.branch))
    way = (plan.leaf_offset, plan.offsets[plan.depth], plan.blocks, plan.depth)
    sizes = (plan.nodes, slots.stride(0), slots.shape[1], *way)
    layer = (heads, dim, weights.hidden, weights.pre, (dim // heads) ** -0.5, precision(nodes.dtype))
    with on_device_of(nodes):
        tensors = (nodes, mask, slots, *weights.tensors)
        _climb(len(nodes), tensors, sizes, (plan.branch, *layer, rows), num_warps=4, num_stages=1)
