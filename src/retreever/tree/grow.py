"""Trees that grow: tokens are appended, replaced and evicted, and only the nodes above them are computed again.

Such a tree is packed from the left: token i lies on leaf slot i, and its capacity is a power of the branch. A slot
whose token was evicted is padding. So after any changes the tree equals the one that `build_nodes` makes at once of the
tokens that are left, on the same slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retreever.ops.aggregate.api import climb as climb_by_kernel
from retreever.ops.aggregate.api import climbs
from retreever.ops.aggregate.steps import steps_of
from retreever.ops.backend import Impl, choose
from retreever.ops.gradients import needs_gradient
from retreever.tree.aggregate import plain_weights
from retreever.tree.plan import TreePlan, packed_plan
from retreever.tree.value import Tree

Rows = Int[Tensor, "b r"]
# Rows of parents on one level, whose first children lie at the second rows: from the last level up.
Level = tuple[Rows, Rows]


def enlarged(tree: Tree, capacity: int) -> Tree:
    """The tree with room for `capacity` tokens: it becomes the first subtree of a deeper one, by copying its rows.

    The nodes above it have their numbers of tokens, and are to be computed like those above a changed slot 0.
    """
    old, new = tree.plan, packed_plan(capacity, tree.plan.branch)
    deeper = new.depth - old.depth

    def moved(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor.clone()  # `length`
        rows = zeros(tensor, new.nodes)
        for level in range(1, old.depth + 2):
            size, start, target = old.branch**level, old.offsets[level], new.offsets[level + deeper]
            rows[:, target : target + size] = tensor[:, start : start + size]
        return rows

    found = replace(tree.map(moved), plan=new, mapped=False)
    assert tree.count is not None and found.count is not None and found.mask is not None
    above = list(new.offsets[1 : deeper + 1])
    found.count[:, above] = tree.count[:, : old.branch].sum(dim=1, keepdim=True, dtype=torch.int32)
    found.mask[:, above] = found.count[:, above] > 0
    return found


def zeros(like: Tensor, rows: int) -> Tensor:
    """Zeros (b, rows, ...); on a CPU in pages that take memory only when they are first written to."""
    shape = (like.shape[0], rows, *like.shape[2:])
    if not like.is_cpu or needs_gradient(like):
        return like.new_zeros(shape)
    pages = np.zeros(like.element_size() * int(np.prod(shape)), np.uint8)
    return torch.from_numpy(pages).view(like.dtype).view(shape)


def levels_above(plan: TreePlan, slots: Int[Tensor, "b w"], run: bool) -> tuple[list[Level], Rows]:
    """The nodes above leaf slots, level by level, and the rows of all of them, behind those of the leaves.

    `slots` ascend in every row; where `run` says that they follow one another, parents hardly repeat.
    """
    powers, offsets = steps_of(plan, slots.device)
    if slots.shape[1] == 1:  # all levels at once
        places = slots // powers
        rows = places + offsets
        first = places[:, 1:] * plan.branch + offsets[:-1]
        if plan.depth == 0:
            return [], rows
        return list(zip(torch.split(rows[:, 1:], 1, 1), torch.split(first, 1, 1), strict=True)), rows
    levels: list[Level] = []
    place, all_rows = slots, [slots + plan.leaf_offset]
    for level in range(plan.depth, 0, -1):
        if run:
            first, last = place[:, :1] // plan.branch, place[:, -1:] // plan.branch
            most = (place.shape[1] + plan.branch - 2) // plan.branch + 1
            place = torch.minimum(first + torch.arange(most, device=place.device), last)
        else:
            place = place // plan.branch
        all_rows.append(place + plan.offsets[level])
        levels.append((all_rows[-1], place * plan.branch + plan.offsets[level + 1]))
    return levels, torch.cat(all_rows, dim=1)


def batch_of(rows: Rows) -> Int[Tensor, "b 1"]:
    """Number of every row of the batch, to index (b, t, ...) by with `rows`."""
    return torch.arange(rows.shape[0], device=rows.device)[:, None]


def recount(tree: Tree, levels: list[Level], rows: Rows, width: int, real: Bool[Tensor, "b w"] | None) -> None:
    """Write the numbers of real tokens, and the mask, of `width` changed leaves and of all nodes above them."""
    count, mask = tree.count, tree.mask
    assert count is not None and mask is not None
    batch = batch_of(rows)
    leaves = rows[:, :width]
    now = torch.ones_like(leaves, dtype=torch.int32) if real is None else real.to(torch.int32)
    if width == 1:
        added = now - count[batch, leaves]
        count.index_put_((batch, rows), count[batch, rows] + added)
    else:
        count.index_put_((batch, leaves), now)
        for parents, first in levels:
            below = count[batch[..., None], family(first, tree.plan.branch)]
            count.index_put_((batch, parents), below.sum(dim=2, dtype=torch.int32))
    mask.index_put_((batch, rows), count[batch, rows] > 0)


def family(first: Rows, branch: int) -> Int[Tensor, "b r k"]:
    """Rows of all children, of which `first` are the leftmost."""
    return first[..., None] + torch.arange(branch, device=first.device)


def write(nodes: Float[Tensor, "b t *d"], batch: Tensor, rows: Rows, values: Float[Tensor, "b r *d"]) -> None:
    """nodes[rows] = values, in place. Rows that repeat hold the same value, and only the first has a gradient."""
    if values.requires_grad and rows.shape[1] > 1:
        again = torch.zeros_like(rows, dtype=torch.bool)
        again[:, 1:] = rows[:, 1:] == rows[:, :-1]
        again = again.view(*again.shape, *[1] * (values.dim() - 2))
        values = torch.where(again, values.detach(), values)
    nodes.index_put_((batch, rows), values.to(nodes.dtype))


def climb(
    tree: Tree,
    slots: Int[Tensor, "b w"],
    levels: list[Level],
    run: bool,
    aggregator: nn.Module,
    detach: bool,
    impl: Impl,
) -> None:
    """Compute the nodes of all levels above `slots` again by the aggregator; see `levels_above`."""
    nodes, mask = tree.nodes, tree.mask
    assert nodes is not None and mask is not None
    backend = choose("climb", impl, nodes)
    near = run or slots.shape[1] == 1
    weights = plain_weights(aggregator) if near and backend != "reference" else None
    if weights is not None and climbs(backend, tree.plan, weights, nodes, slots.shape[1]):
        climb_by_kernel(backend, nodes, mask, slots, tree.plan, weights)
        return
    for parents, first in levels:
        batch, below = batch_of(parents), family(first, tree.plan.branch)
        children, real = nodes[batch[..., None], below], mask[batch[..., None], below]
        summary = aggregator((children.detach() if detach else children).flatten(0, 1), real.flatten(0, 1))
        write(nodes, batch, parents, summary.view(*parents.shape, -1))
