"""Trees of means that grow: keys and values of the nodes above changed tokens are weighted means of their children's.

Means are computed again from the children, never corrected by what changed, so that rounding errors do not add up.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.tree.grow import Level, Rows, batch_of, family, write
from retreever.tree.value import Tree

Heads = Float[Tensor, "b _ h e"]


def climb_means(tree: Tree, levels: list[Level], rows: Rows, width: int) -> None:
    """Compute keys and values of all nodes above the first `width` rows again, which are leaves and written."""
    for part in (tree.keys, tree.values):
        if width == 1 and levels:
            _climb_at_once(tree, part, levels, rows)
        else:
            _climb_levels(tree, part, levels)


def _climb_at_once(tree: Tree, part: Heads, levels: list[Level], rows: Rows) -> None:
    """All levels at once: a node's sum is that of its leaf and of the siblings of all nodes on the way up to it."""
    assert tree.count is not None
    batch = batch_of(rows)
    below = family(torch.cat([first for _, first in levels], dim=1), tree.plan.branch)
    beside = below != rows[:, :-1, None]  # not on the way itself
    count = tree.count[batch[..., None], below] * beside
    dtype = torch.promote_types(part.dtype, torch.float32)
    sums = (part[batch[..., None], below].to(dtype) * count[..., None, None]).sum(dim=2)
    sums[:, 0] += _leaf(tree, part, rows, dtype)
    total = tree.count[batch, rows[:, 1:]].clamp_min(1)
    write(part, batch, rows[:, 1:], sums.cumsum(dim=1) / total[..., None, None])


def _leaf(tree: Tree, part: Heads, rows: Rows, dtype: torch.dtype) -> Float[Tensor, "b h e"]:
    """The changed leaf, 0 if it is padding."""
    assert tree.count is not None
    batch, leaf = batch_of(rows)[:, 0], rows[:, 0]
    return part[batch, leaf].to(dtype) * tree.count[batch, leaf, None, None]


def _climb_levels(tree: Tree, part: Heads, levels: list[Level]) -> None:
    assert tree.count is not None
    dtype = torch.promote_types(part.dtype, torch.float32)
    for parents, first in levels:
        batch, below = batch_of(parents), family(first, tree.plan.branch)
        count = tree.count[batch[..., None], below]
        sums = (part[batch[..., None], below].to(dtype) * count[..., None, None]).sum(dim=2)
        write(part, batch, parents, sums / count.sum(dim=2).clamp_min(1)[..., None, None])
