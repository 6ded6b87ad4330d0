"""Build a tree over context tokens: lay them on leaves, then summarise level by level (paper, section 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.ops.aggregate.api import aggregate, aggregates
from retreever.ops.backend import Impl, choose
from retreever.tree.aggregate import MeanAggregator, plain_weights
from retreever.tree.order import in_order, leaf_layout
from retreever.tree.plan import TreePlan, packed_plan

CACHED_ROWS, MOST_PLANS = 2048, 1024
_MEAN = MeanAggregator()
_PLANS: dict[tuple[int, int, bool], TreePlan] = {}


def plan_for(n: int, branch: int, ragged: bool, capacity: int | None = None) -> TreePlan:
    """The plan `build_nodes` uses. In a ragged batch leaf blocks have `branch` slots, so that shorter contexts fit."""
    if capacity is not None:
        return packed_plan(max(n, capacity), branch)
    if torch.compiler.is_compiling():
        return TreePlan(n, branch, block=min(n, branch) if ragged else 0)
    found = _PLANS.get((n, branch, ragged))
    if found is None:
        if len(_PLANS) >= MOST_PLANS:
            _PLANS.clear()
        found = _PLANS[n, branch, ragged] = TreePlan(n, branch, block=min(n, branch) if ragged else 0)
    return found


def build_nodes(
    context: Float[Tensor, "b n d"],
    aggregator: nn.Module,
    branch: int = 2,
    mask: Bool[Tensor, "b n"] | None = None,
    detach: bool = False,
    impl: Impl = "auto",
    capacity: int | None = None,
    mean_levels: int = 0,
) -> tuple[TreePlan, Float[Tensor, "b t d"], Bool[Tensor, "b t"] | None]:
    """Embeddings of all nodes over `context`, whose tokens are already in leaf order and checked.

    Args:
        context: the tokens.
        aggregator: called as aggregator(children (g, k, d), mask (g, k) or None) -> (g, d), once per level.
        branch: children per node.
        mask: True where a token is real. The tree is that of the real tokens alone; the others are never read.
        detach: cut the gradient between levels, as the paper's code does.
        impl: backend of the transformer aggregator, where a kernel can replace it.
        capacity: pack the tokens from the left, with room for so many: token i lies on leaf slot i. None spreads them
            evenly.
        mean_levels: lowest levels whose nodes are means of their children, without the aggregator.

    Returns:
        The plan, the nodes and the node mask (None when all nodes are real).
    """
    plan = plan_for(context.shape[1], branch, mask is not None, capacity)
    leaves, real = leaves_of(context, plan, mask, capacity is not None)
    return plan, *nodes_over(leaves, real, plan, aggregator, detach, impl, mean_levels)


def nodes_over(
    leaves: Float[Tensor, "b leaves d"],
    real: Bool[Tensor, "b leaves"] | None,
    plan: TreePlan,
    aggregator: nn.Module,
    detach: bool = False,
    impl: Impl = "auto",
    mean_levels: int = 0,
) -> tuple[Float[Tensor, "b t d"], Bool[Tensor, "b t"] | None]:
    """Nodes and node mask above tokens that lie on their leaf slots; `real` is None where every slot has one."""
    masks = None if real is None else level_masks(plan, real)
    node_mask = None if masks is None else torch.cat(masks[::-1], dim=1)
    if not mean_levels and choose("aggregate", impl, leaves) != "reference":
        weights = plain_weights(aggregator)
        if weights is not None and aggregates(plan, weights, leaves):
            return aggregate(leaves, node_mask, plan, weights), node_mask
    levels = [leaves]
    for height in range(plan.depth):
        level_mask = None if masks is None else masks[height]
        summary = _MEAN if height < mean_levels else aggregator
        levels.append(summarise(levels[-1], level_mask, plan.branch ** (plan.depth - height), summary, detach))
    return torch.cat(levels[::-1], dim=1), node_mask


def leaves_of(
    context: Tensor, plan: TreePlan, mask: Tensor | None, packed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Tokens on their leaf slots (b, leaves, d), and which slots are real; `packed` keeps them in their places."""
    if packed:
        room = plan.leaves - context.shape[1]
        real = context.new_ones(context.shape[:2], dtype=torch.bool) if mask is None else mask
        tokens = context if mask is None else context.masked_fill(~mask[..., None], 0)
        return F.pad(tokens, (0, 0, 0, room)), F.pad(real, (0, room))
    if mask is None and plan.full:
        return context, None
    if mask is None:
        layout = leaf_layout(plan, torch.full((1,), plan.n, device=context.device))
        leaves = context.index_select(1, layout.index[0]).masked_fill(~layout.real[..., None], 0)
        return leaves, layout.real.expand(context.shape[0], -1)
    layout = leaf_layout(plan, mask.sum(dim=1))
    token = (~mask).to(torch.int8).argsort(dim=1, stable=True).gather(1, layout.index)
    return in_order(context, token).masked_fill(~layout.real[..., None], 0), layout.real


def level_masks(plan: TreePlan, real: Bool[Tensor, "b leaves"]) -> list[Bool[Tensor, "b _"]]:
    """Masks of all levels, from the leaves up: a node is real when any leaf below it is."""
    levels = [real]
    for parents in (plan.branch**depth for depth in range(plan.depth, 0, -1)):
        below = levels[-1]
        levels.append(below.reshape(real.shape[0], parents, below.shape[1] // parents).any(dim=2))
    return levels


def summarise(
    level: Float[Tensor, "b children d"],
    real: Bool[Tensor, "b children"] | None,
    parents: int,
    aggregator: nn.Module,
    detach: bool,
) -> Float[Tensor, "b parents d"]:
    """The parents of a level, by one call of the aggregator for the whole batch."""
    b, nodes, d = level.shape
    children = level.reshape(b * parents, nodes // parents, d)
    if detach:
        children = children.detach()
    mask = None if real is None else real.reshape(b * parents, nodes // parents)
    summary = _in_cache(aggregator, children, mask)
    if summary.shape != (b * parents, d):
        reject("aggregator", f"one summary per parent, shape {(b * parents, d)}", tuple(summary.shape))
    return summary.reshape(b, parents, d)


def _in_cache(aggregator: nn.Module, children: Tensor, mask: Tensor | None) -> Tensor:
    """Call the aggregator; on a CPU without gradients in pieces, whose activations stay in the cache."""
    if children.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():  # a graph fits any batch
        return aggregator(children, mask)
    pieces = -(-children.shape[0] * children.shape[1] // CACHED_ROWS)
    if pieces <= 1:
        return aggregator(children, mask)
    masks = [None] * pieces if mask is None else mask.tensor_split(pieces)
    parts = zip(children.tensor_split(pieces), masks, strict=True)
    return torch.cat([aggregator(part, part_mask) for part, part_mask in parts])
