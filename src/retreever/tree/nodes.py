"""Nodes of a tree by their numbers: level, parent, children and leaf slots.

The root, which is never stored, is node 0, and row r of the flat node tensor is node r + 1. Ranges are half-open pairs
(start, stop).
"""

from __future__ import annotations

from retreever.tree.plan import TreePlan

Range = tuple[int, int]


def level_of(plan: TreePlan, node: int) -> int:
    """Level of a node: 0 for the root, `plan.depth + 1` for leaves."""
    return next(level for level in range(plan.depth + 1, -1, -1) if node > plan.offsets[level])


def children_of(plan: TreePlan, node: int) -> range:
    """Children of a node, padding included; none for a leaf."""
    level = level_of(plan, node)
    if level > plan.depth:
        return range(0)
    width = plan.branch if level < plan.depth else plan.block
    first = plan.offsets[level + 1] + 1 + (node - 1 - plan.offsets[level]) * width
    return range(first, first + width)


def parent_of(plan: TreePlan, node: int) -> int:
    """Parent of a node other than the root."""
    level = level_of(plan, node)
    width = plan.branch if level <= plan.depth else plan.block
    return plan.offsets[level - 1] + 1 + (node - 1 - plan.offsets[level]) // width


def slots_of(plan: TreePlan, node: int) -> Range:
    """Leaf slots under a node; a leaf's own slot."""
    level = level_of(plan, node)
    width = plan.block * plan.branch ** (plan.depth - level) if level <= plan.depth else 1
    index = node - 1 - plan.offsets[level]
    return index * width, (index + 1) * width


def descendants(plan: TreePlan, node: int) -> list[int]:
    """All nodes below a node."""
    return [below for child in children_of(plan, node) for below in (child, *descendants(plan, child))]
