"""Build a tree over context tokens: lay them on leaves, then summarise level by level (paper, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.checks import check_any_real, check_finite, check_float, check_mask, check_same, check_tensor
from retreever.nn.triton_here import triton_installed
from retreever.tree.aggregate import TransformerAggregator
from retreever.tree.ascent import ascend, fits
from retreever.tree.layout import leaf_layout
from retreever.tree.plan import TreePlan

CACHED_ROWS = 2048


@dataclass(frozen=True)
class Tree:
    """A tree is a value: the nodes of all levels in one flat tensor, and the keys and values made from them.

    Attributes:
        plan: the shape.
        nodes: embeddings, level after level, the leaves last.
        mask: True where a node covers at least one real token; None when every node does.
        keys: projected keys of all nodes, made once.
        values: projected values of all nodes, made once.
    """

    plan: TreePlan
    nodes: Float[Tensor, "b t d"]
    mask: Bool[Tensor, "b t"] | None
    keys: Float[Tensor, "b t h e"]
    values: Float[Tensor, "b t h e"]


def plan_for(n: int, branch: int, mask: Tensor | None) -> TreePlan:
    """The plan `build_nodes` uses: a ragged batch has whole blocks, so that any shorter context fits its own tree."""
    return TreePlan(n, branch, block=0 if mask is None else branch if n > branch else n)


def build_nodes(
    context: Float[Tensor, "b n d"],
    aggregator: nn.Module,
    branch: int = 2,
    mask: Bool[Tensor, "b n"] | None = None,
    detach: bool = False,
) -> tuple[TreePlan, Float[Tensor, "b t d"], Bool[Tensor, "b t"] | None]:
    """Embeddings of all nodes over `context`, whose tokens are already in leaf order.

    Args:
        context: the tokens.
        aggregator: called as aggregator(children (g, k, d), mask (g, k) or None) -> (g, d), once per level.
        branch: children per node.
        mask: True where a token is real. The tree is that of the real tokens alone; what stands in the others is
            never read.
        detach: cut the gradient between levels, as the paper's code does.

    Returns:
        The plan, the nodes and the node mask (None when all nodes are real).
    """
    _check_context(context, mask)
    plan = plan_for(context.shape[1], branch, mask)
    level, real = _leaves(context, plan, mask)
    if isinstance(aggregator, TransformerAggregator) and _one_launch_per_level(aggregator, branch, context):
        return plan, *_aggregate_in_place(aggregator, plan, level, real)
    if isinstance(aggregator, TransformerAggregator) and aggregator.fused and fits(aggregator.layer, plan, level):
        steps = None if real is None else _level_masks(plan, real)
        nodes = ascend(aggregator.layer, plan, level, steps, detach)
        return plan, nodes, None if steps is None else torch.cat(steps[::-1], dim=1)
    levels, masks = [level], [real]
    for blocks in (plan.branch**depth for depth in range(plan.depth, 0, -1)):
        level, real = _summarise(level, real, blocks, aggregator, detach)
        levels.insert(0, level)
        masks.insert(0, real)
    real_masks = [part for part in masks if part is not None]
    return plan, torch.cat(levels, dim=1), torch.cat(real_masks, dim=1) if real_masks else None


def _check_context(context: Tensor, mask: Tensor | None) -> None:
    check_tensor("context", context, "b n d")
    check_float("context", context)
    if context.shape[1] == 0:
        reject("context", "at least one token", tuple(context.shape))
    if mask is not None:
        check_mask("mask", mask, "b n", b=context.shape[0], n=context.shape[1])
        check_same("mask", mask, "context", context, dtype=False)
        check_any_real("mask", mask)
    check_finite("context", context, mask)


def _leaves(context: Tensor, plan: TreePlan, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens on their leaf slots (b, leaves, d), and which slots are real."""
    if mask is None and plan.full:
        return context, None
    if mask is None:
        layout = leaf_layout(plan, torch.full((1,), plan.n, device=context.device))
        leaves = context[:, layout.index[0]].masked_fill(~layout.real[..., None], 0)
        return leaves, layout.real.expand(context.shape[0], -1)
    layout = leaf_layout(plan, mask.sum(dim=1))
    token = (~mask).to(torch.int8).argsort(dim=1, stable=True).gather(1, layout.index)
    leaves = context.gather(1, token[..., None].expand(-1, -1, context.shape[2]))
    return leaves.masked_fill(~layout.real[..., None], 0), layout.real


def _one_launch_per_level(aggregator: TransformerAggregator, branch: int, context: Tensor) -> bool:
    """Whether the fused kernel may be used: on CUDA, with no gradient asked for and no dropout to draw."""
    if not context.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if (aggregator.training and aggregator.layer.dropout) or not triton_installed():
        return False
    from retreever.tree import aggregate_kernel

    return aggregate_kernel.fits(aggregator.layer, branch, context)


def _aggregate_in_place(
    aggregator: TransformerAggregator, plan: TreePlan, leaves: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """All levels above the leaves, one launch each, straight into the flat node tensor."""
    from retreever.tree.aggregate_kernel import aggregate_levels

    nodes = leaves.new_empty(leaves.shape[0], plan.nodes, leaves.shape[2])
    nodes[:, plan.leaf_offset :] = leaves
    mask = None if real is None else torch.cat(_level_masks(plan, real)[::-1], dim=1)
    aggregate_levels(aggregator.layer, plan, nodes, mask)
    return nodes, mask


def _level_masks(plan: TreePlan, real: Bool[Tensor, "b leaves"]) -> list[Bool[Tensor, "b _"]]:
    """A node is real when any leaf below it is; level by level, from the leaves up."""
    levels = [real]
    for parents in (plan.branch**depth for depth in range(plan.depth, 0, -1)):
        below = levels[-1]
        levels.append(below.reshape(real.shape[0], parents, below.shape[1] // parents).any(dim=2))
    return levels


def _summarise(
    level: Tensor, real: Tensor | None, parents: int, aggregator: nn.Module, detach: bool
) -> tuple[Tensor, Tensor | None]:
    """One level up: all sibling groups of the batch at once through the aggregator."""
    b, nodes, d = level.shape
    children = level.reshape(b * parents, nodes // parents, d)
    if detach:
        children = children.detach()
    groups = None if real is None else real.reshape(b * parents, nodes // parents)
    summary = _in_cache(aggregator, children, groups)
    if summary.shape != (b * parents, d):
        reject("aggregator", f"one summary a group, shape {(b * parents, d)}", tuple(summary.shape))
    above = None if real is None else real.reshape(b, parents, nodes // parents).any(dim=2)
    return summary.reshape(b, parents, d), above


def _in_cache(aggregator: nn.Module, children: Tensor, groups: Tensor | None) -> Tensor:
    """On a CPU, without gradients, a long level goes through in pieces whose activations stay in the cache."""
    pieces = -(-children.shape[0] * children.shape[1] // CACHED_ROWS)
    if children.is_cuda or torch.is_grad_enabled() or pieces <= 1 or torch.compiler.is_compiling():
        return aggregator(children, groups)
    masks = [None] * pieces if groups is None else groups.tensor_split(pieces)
    parts = zip(children.tensor_split(pieces), masks, strict=True)
    return torch.cat([aggregator(part, mask) for part, mask in parts])
