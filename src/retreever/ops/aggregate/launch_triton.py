"""Launches of the aggregation kernel: one per level from the leaves up, one for several short levels."""

from __future__ import annotations

import torch
from torch import Tensor

from retreever.ops.aggregate.kernels_triton import aggregate_up
from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.launching_triton import on_device_of, precision
from retreever.tree.plan import TreePlan, tree_depth

# Rows of a tile on long levels and on short ones, and the number of parents up to which a level is short: a short level
# takes the time of one program, since it does not fill the GPU. A warp works on 16 rows of a long level.
ROWS, SHORT_ROWS, SHORT = 64, 32, 4096
PAIR_ROWS = 128  # pairs in float32: weights are read half as often (a million tokens, H200: 8.9 ms with 64, 6.8 so)


def aggregate_triton(nodes: Tensor, mask: Tensor | None, plan: TreePlan, weights: LayerWeights) -> None:
    """Write all inner levels of `nodes` (b, t, d) in place; its leaves are already written.

    Long levels are a launch each. Once a level is too short to keep a GPU busy, a launch climbs as many levels as its
    programs can compute independently.
    """
    level, children, first_child = plan.depth, plan.block, plan.leaf_offset
    long = PAIR_ROWS if plan.branch == 2 and nodes.dtype == torch.float32 else ROWS
    while level:
        parents = plan.branch**level
        short = nodes.shape[0] * parents <= SHORT
        rows = SHORT_ROWS if short else long
        steps = min(level, climb(rows, children)) if short and children == plan.branch else 1
        _launch(nodes, mask, weights, (first_child, plan.offsets[level], parents), children, rows, steps)
        level, children = level - steps, plan.branch
        first_child = plan.offsets[level + 1]


def climb(rows: int, children: int) -> int:
    """Number of levels a tile of `rows` rows can climb: the largest c with children^c <= rows."""
    return tree_depth(rows + 1, children)


def _launch(
    nodes: Tensor,
    mask: Tensor | None,
    weights: LayerWeights,
    level: tuple[int, int, int],
    children: int,
    rows: int,
    steps: int,
) -> None:
    first_child, first_parent, parents = level
    total_parents = nodes.shape[0] * parents
    count = rows // children if steps == 1 else children ** (climb(rows, children) - 1)
    dim = nodes.shape[2]
    with on_device_of(nodes):
        aggregate_up[(-(-total_parents // count),)](
            nodes, mask, nodes.stride(0), 0 if mask is None else mask.stride(0),
            first_child, first_parent, parents, total_parents, count, steps, *weights.tensors,
            children, weights.heads, dim, weights.hidden, weights.pre, (dim // weights.heads) ** -0.5,
            precision(nodes.dtype), rows, num_warps=max(4, rows // 16), num_stages=1,
        )  # fmt: skip
