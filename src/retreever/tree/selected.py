"""The selected set of a path, computed from the path alone: which nodes a query attended to, and how many."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retreever.tree.plan import TreePlan


def path_nodes(plan: TreePlan, path: Int[Tensor, "b m"]) -> Int[Tensor, "b m depth"]:
    """Row of the node the path takes on every level 1..depth."""
    levels = range(1, plan.depth + 1)
    return _stack([plan.offsets[level] + path // plan.branch ** (plan.depth - level) for level in levels], path)


def selected_nodes(
    plan: TreePlan, path: Int[Tensor, "b m"], node_mask: Bool[Tensor, "b t"] | None = None
) -> Int[Tensor, "b m s"]:
    """Rows of the rejected siblings on every level, then the leaves of the last block; -1 where there is none."""
    taken = path_nodes(plan, path)[..., None]  # (b, m, depth, 1)
    sibling = torch.arange(plan.branch - 1, device=path.device)
    levels = range(1, plan.depth + 1)
    offsets = torch.tensor([plan.offsets[level] for level in levels], dtype=path.dtype, device=path.device)
    first = taken - (taken - offsets[:, None]) % plan.branch  # the leftmost sibling
    siblings = first + sibling
    siblings = (siblings + (siblings >= taken)).flatten(-2)  # skip the child taken
    leaves = plan.leaf_offset + path[..., None] * plan.block + torch.arange(plan.block, device=path.device)
    rows = torch.cat([siblings, leaves], dim=-1)
    return rows if node_mask is None else torch.where(_real(node_mask, rows), rows, -1)


def leaf_nodes(
    plan: TreePlan, path: Int[Tensor, "b m"], node_mask: Bool[Tensor, "b t"] | None = None
) -> Int[Tensor, "b m s"]:
    """Rows of all leaves, -1 at padding: the selected set when nothing is searched."""
    rows = torch.arange(plan.leaf_offset, plan.nodes, device=path.device).expand(*path.shape, -1)
    return rows if node_mask is None else torch.where(_real(node_mask, rows), rows, -1)


def nodes_scored(
    plan: TreePlan, path: Int[Tensor, "b m"], node_mask: Bool[Tensor, "b t"] | None = None
) -> Int[Tensor, "b m"]:
    """Number of real nodes the policy scored to choose the path: all children wherever there was a choice."""
    siblings = selected_nodes(plan, path, node_mask)[..., : plan.depth * (plan.branch - 1)]
    rejected = (siblings.reshape(*path.shape, plan.depth, plan.branch - 1) >= 0).sum(dim=-1)
    return (rejected + (rejected > 0)).sum(dim=-1)


def frontier_scored(plan: TreePlan, rows: Int[Tensor, "b m s"]) -> Int[Tensor, "b m"]:
    """Number of nodes scored to leave `rows` (-1 is none): all children above the leaves wherever there was a choice.

    None is scored where all leaves are read.
    """
    read = torch.zeros(*rows.shape[:2], plan.nodes + 1, dtype=torch.bool, device=rows.device)
    read = read.scatter(2, rows.masked_fill(rows < 0, plan.nodes), value=True)
    opened = read[..., plan.leaf_offset : -1].reshape(*rows.shape[:2], plan.blocks, plan.block).any(dim=3)
    scored = torch.zeros_like(rows[..., 0])
    for level in range(plan.depth, 0, -1):
        nodes = plan.branch**level
        present = opened | read[..., plan.offsets[level] : plan.offsets[level] + nodes]
        children = present.reshape(*rows.shape[:2], nodes // plan.branch, plan.branch).sum(dim=3)
        scored = scored + children.masked_fill(children < 2, 0).sum(dim=2)
        opened = children > 0
    return scored.masked_fill(((rows < 0) | (rows >= plan.leaf_offset)).all(dim=2), 0)


def _stack(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts, dim=-1) if parts else like.new_empty(*like.shape, 0)


def _real(node_mask: Tensor, rows: Tensor) -> Tensor:
    return node_mask.gather(1, rows.flatten(1)).view_as(rows)
