"""How `TreeCrossAttention` makes a tree: order of the tokens, nodes, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retreever.batch import without_padding
from retreever.nn.blocks import AttentionBlock
from retreever.nn.plain import plain_projection
from retreever.ops.aggregate.api import project, projects
from retreever.ops.backend import Impl, choose, transformed
from retreever.ops.search.api import counted_keys
from retreever.tree.aggregate import Correction
from retreever.tree.build import build_nodes
from retreever.tree.means import log_counts, mean_nodes, mean_tree, node_counts
from retreever.tree.order import in_order, permutation_of
from retreever.tree.plan import TreePlan
from retreever.tree.stamp import Sources, Stamp
from retreever.tree.value import Tree

TokenOrder = Literal["given", "keys"]
TOKEN_ORDERS: tuple[TokenOrder, ...] = get_args(TokenOrder)
Mask = Bool[Tensor, "b n"] | None


class TreeModule(nn.Module):
    """The settings of a `TreeCrossAttention` by which trees are made and read."""

    block: AttentionBlock
    aggregator: nn.Module | None
    correction: Correction | None
    branch: int
    detach: bool
    mean_levels: int
    log_count: bool
    order: TokenOrder
    budget: int | None
    impl: Impl


def build_tree(module: TreeModule, context: Float[Tensor, "b n c"], mask: Mask, capacity: int | None) -> Tree:
    """The tree over `context`, whose arguments are checked; with a capacity, in the order given."""
    if module.correction is not None:
        return _build_corrected(module, without_padding(context, mask), mask)
    if module.aggregator is None:
        return build_means(module, *key_values(module, without_padding(context, mask)), mask, capacity)
    sorts = module.order == "keys" and capacity is None
    keys = key_values(module, without_padding(context, mask))[0] if sorts else context
    (context,), mask, order = _in_leaf_order(module, (context,), keys, mask, capacity)
    plan, nodes, node_mask = _embeddings(module, context, mask, capacity)
    tree = Tree(plan, nodes, node_mask, *key_values(module, nodes), order=order)
    return _completed(module, tree, context.shape[1], capacity)


def _build_corrected(module: TreeModule, context: Float[Tensor, "b n c"], mask: Mask) -> Tree:
    """Nodes are means of keys and values, and above the lowest levels what `correction` makes of embeddings."""
    assert module.correction is not None
    pair = key_values(module, context)
    (keys, values, context), mask, order = _in_leaf_order(module, (*pair, context), pair[0], mask, None)
    plan, keys, values, node_mask = mean_tree(keys, values, module.branch, mask)
    nodes = _embeddings(module, context, mask, None)[1]
    top = plan.offsets[max(1, plan.depth + 1 - module.mean_levels)]  # nodes of the levels above
    if top:
        more = module.block.split_heads(module.correction(nodes[:, :top]))
        keys, values = (
            torch.cat([means[:, :top] + part, means[:, top:]], dim=1)
            for means, part in zip((keys, values), more, strict=True)
        )
    return _completed(module, Tree(plan, nodes, node_mask, keys, values, order=order), context.shape[1], None)


def _embeddings(
    module: TreeModule, context: Float[Tensor, "b n c"], mask: Mask, capacity: int | None
) -> tuple[TreePlan, Tensor, Tensor | None]:
    """Plan, embeddings of all nodes and node mask over tokens in leaf order."""
    if module.aggregator is None:
        return mean_nodes(context, module.branch, mask, capacity)
    return build_nodes(
        context, module.aggregator, module.branch, mask, module.detach, module.impl, capacity, module.mean_levels
    )


def build_means(
    module: TreeModule,
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Mask,
    capacity: int | None = None,
) -> Tree:
    """The tree of means over the keys and values of tokens; padding holds finite numbers."""
    n = keys.shape[1]
    (keys, values), mask, order = _in_leaf_order(module, (keys, values), keys, mask, capacity)
    plan, keys, values, node_mask = mean_tree(keys, values, module.branch, mask, capacity)
    return _completed(module, Tree(plan, None, node_mask, keys, values, order=order), n, capacity)


def key_values(
    module: TreeModule, tokens: Float[Tensor, "b t d"]
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]]:
    """Keys and values of tokens or nodes; by one kernel where the layers are plain."""
    if choose("aggregate", module.impl, tokens) != "reference":
        weights = plain_projection(module.block)
        if weights is not None and projects(tokens, weights):
            return module.block.split_heads(project(tokens, weights))
    return module.block.key_values(tokens)


def makers(module: TreeModule) -> Sources:
    """The layers whose weights are in a tree."""
    block = module.block
    norm = block.norm if block.shared_norm else block.context_norm
    layers = {"aggregator": module.aggregator, "correction": module.correction, "norm": norm, "to_kv": block.to_kv}
    return {role: layer for role, layer in layers.items() if layer is not None}


def stamped() -> bool:
    """Whether trees remember the weights that made them: not while compiling, nor inside a torch.func transform."""
    return not (torch.compiler.is_compiling() or transformed())


def _completed(module: TreeModule, tree: Tree, n: int, capacity: int | None) -> Tree:
    """The tree with log counts, with what a growing one needs, and with the stamp of the weights."""
    if module.log_count:
        counts = log_counts(tree.plan, tree.mask, tree.keys)
        tree = replace(tree, log_count=counts, counted=counted_keys(tree.keys, counts))
    if capacity is not None:
        assert tree.mask is not None
        ends = torch.arange(1, tree.plan.leaves + 1, device=tree.keys.device)
        length = (tree.mask[:, tree.plan.leaf_offset :] * ends).amax(dim=1)  # behind the last real token
        tree = replace(tree, count=node_counts(tree.plan, tree.mask), length=length, longest=n)
    if not stamped():
        return tree
    return replace(tree, stamp=Stamp.of(module, makers(module)))


def _in_leaf_order(
    module: TreeModule, tokens: Sequence[Tensor], keys: Tensor, mask: Mask, capacity: int | None
) -> tuple[Sequence[Tensor], Mask, Int[Tensor, "b n"] | None]:
    """`tokens` (b, n, ...) and mask in leaf order, and that order; it is found from `keys` if the module sorts."""
    if capacity is not None:
        return tokens, mask, None
    if module.order == "keys":
        order = permutation_of("principal", keys.detach().flatten(2), mask, module.branch, 0, 0)
        return [in_order(part, order) for part in tokens], None if mask is None else in_order(mask, order), order
    if mask is None:
        return tokens, None, None
    return tokens, mask, permutation_of("given", keys, mask, module.branch, 0, 0)
