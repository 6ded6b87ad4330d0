"""How a reading budget is spread over a tree: how many nodes of every level are opened.

A search starts with the root as its only node. Opening a node replaces it by its children; what stands at the end is
read, and covers every token once. One path opens one node of every level. A budget opens more: as many on all levels,
but half as many again on the last level but one and twice as many on the last, where opening pays most.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retreever.tree.plan import TreePlan

MOST_TABLES = 1024
_TABLES: dict[tuple[int, int, int, int], tuple[tuple[int, ...], ...]] = {}


class Spread(NamedTuple):
    """How many nodes to open on levels 1 to depth: for every own depth of a context (rows), and the most of all.

    A context that is shorter than others of its batch has fewer levels of its own, which are the lowest ones. `own` is
    the depth of every context, -1 where the budget covers all its tokens; None where every context has all levels.
    `chosen` has the widths of a smaller budget that is known only when a graph runs; `table` then has the most.
    """

    table: tuple[tuple[int, ...], ...]
    own: Int[Tensor, " b"] | None
    chosen: Int[Tensor, "depths depth"] | None = None

    @property
    def widest(self) -> tuple[int, ...]:
        """Most nodes opened on every level by any context."""
        rows = self.table if self.own is not None else self.table[-1:]
        return tuple(max(column) for column in zip(*rows, strict=True))


def spread(plan: TreePlan, budget: int, node_mask: Bool[Tensor, "b t"] | None) -> Spread:
    """The nodes to open under `budget`, which is less than the tokens of the longest context."""
    table = _table(plan.branch, plan.depth, plan.block, budget)
    if node_mask is None or budget == 1:  # one path: a node on every level, however deep a context is
        return Spread(table, None)
    own, blocks, real = _own_depth(plan, node_mask)
    covered = (real <= budget) & (blocks <= slots(plan, budget))
    return Spread(table, own.masked_fill(covered, -1))


def spread_up_to(plan: TreePlan, most: int, budget: Int[Tensor, " one"], node_mask: Bool[Tensor, "b t"]) -> Spread:
    """`spread` for a budget that is a tensor, `most` where it is larger: one graph for all, as wide as the widest."""
    budget = budget.clamp(1, most)
    tables = [_table(plan.branch, plan.depth, plan.block, number) for number in range(1, most + 1)]
    widest = tuple(tuple(map(max, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))
    own, blocks, real = _own_depth(plan, node_mask)
    covered = (real <= budget) & (blocks <= budget.clamp(plan.tokens, plan.leaves))
    every = torch.tensor(tables, device=node_mask.device).view(most, plan.depth + 1, plan.depth)
    chosen = every.index_select(0, budget - 1)[0]
    return Spread(widest, own.masked_fill(covered, -1), chosen)


def _own_depth(plan: TreePlan, node_mask: Bool[Tensor, "b t"]) -> tuple[Tensor, Tensor, Tensor]:
    """Depth of every context's own tree, its leaf blocks and its tokens."""
    real = node_mask[:, plan.leaf_offset :]
    ends = torch.arange(1, plan.leaves + 1, device=real.device)
    blocks = ((real * ends).amax(dim=1) + plan.block - 1) // plan.block  # a context lies on the leftmost of them
    level = torch.arange(plan.depth, device=real.device)
    # Blocks below a node, from the last level up; a product, as AOTInductor takes `**` for floats.
    reach = torch.where(level[:, None] > level, plan.branch, 1).prod(dim=1)
    return (blocks[:, None] > reach).sum(dim=1), blocks, real.sum(dim=1)


def slots(plan: TreePlan, budget: int) -> int:
    """Most tokens that any query reads: one path at least."""
    return min(max(budget, plan.tokens), plan.leaves)


def _table(branch: int, depth: int, block: int, budget: int) -> tuple[tuple[int, ...], ...]:
    """Widths of all levels for every own depth."""
    key = branch, depth, block, budget
    found = None if torch.compiler.is_compiling() else _TABLES.get(key)
    if found is None:
        rows = (level_widths(branch, own, budget, block) for own in range(depth + 1))
        found = tuple((1,) * (depth - len(row)) + row for row in rows)
        if not torch.compiler.is_compiling():
            if len(_TABLES) >= MOST_TABLES:
                _TABLES.clear()
            _TABLES[key] = found
    return found


def level_widths(branch: int, depth: int, budget: int, block: int = 0) -> tuple[int, ...]:
    """Nodes to open on levels 1 to depth so that at most `budget` tokens are read; one path if it allows no more.

    Leaf blocks count as `block` tokens, at least `branch`, whatever they hold: so every context of a ragged batch is
    read as if it were alone.
    """
    block = max(branch, block)
    low, high = 1, 2 * branch**depth
    while low < high:
        middle = (low + high + 1) // 2
        if _read(branch, block, _shape(depth, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    widths, wider = list(_shape(depth, low)), _shape(depth, low + 1)
    for level in reversed(range(depth)):  # what is left goes to the lowest levels
        while widths[level] < wider[level]:
            widths[level] += 1
            if _read(branch, block, tuple(widths)) > budget:
                widths[level] -= 1
                break
    return _opened(branch, tuple(widths))


def _shape(depth: int, step: int) -> tuple[int, ...]:
    """Widths of all levels: odd steps widen every level by one node, even ones the last two more than the others."""
    width, extended = (step + 1) // 2, step // 2
    last = (max(width, -(-3 * extended // 2)), max(width, 2 * extended))
    return (*[width] * (depth - 2), *last[2 - min(depth, 2) :])


def _opened(branch: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The widths, where no level opens more nodes than it has been given."""
    opened, nodes = [], 1
    for width in widths:
        nodes = min(width, nodes * branch)
        opened.append(nodes)
    return tuple(opened)


def _read(branch: int, block: int, widths: tuple[int, ...]) -> int:
    """Tokens read when these many nodes are opened on every level."""
    opened = (1, *_opened(branch, widths))
    kept = sum(branch * above - here for above, here in pairwise(opened))
    return kept + opened[-1] * block
