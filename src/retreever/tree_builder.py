"""`TreeBuilder`: the part of `TreeCrossAttention` that prepares a context, and the settings it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from retreever.attention_inputs import check_context
from retreever.batch import without_padding
from retreever.cross_attention import Context, Mask
from retreever.nn.blocks import AttentionBlock
from retreever.nn.plain import plain_projection
from retreever.ops.aggregate.api import project, projects
from retreever.ops.backend import Impl, choose
from retreever.ops.search.api import counted_keys
from retreever.tree.aggregate import Correction
from retreever.tree.build import Tree, build_nodes
from retreever.tree.means import log_counts, mean_nodes, mean_tree
from retreever.tree.order import in_order, permutation_of
from retreever.tree.plan import TreePlan

TokenOrder = Literal["given", "keys"]
TOKEN_ORDERS: tuple[TokenOrder, ...] = ("given", "keys")


class TreeBuilder(nn.Module):
    """Builds trees whose nodes have the keys and values of `block`.

    Attributes:
        block: the attention.
        aggregator: summarises children; None takes means.
        correction: added to means of keys and values; None where nodes are not means, or nothing is learned.
        branch: children per node.
        detach: cut gradients between tree levels.
        mean_levels: lowest levels whose nodes are means alone.
        order: "given" takes tokens in leaf order; "keys" puts tokens with similar keys side by side.
        log_count: whether the logarithm of its number of tokens is added to the score of a node.
        impl: which kernels run.
    """

    block: AttentionBlock
    aggregator: nn.Module | None
    correction: Correction | None
    branch: int
    detach: bool
    mean_levels: int
    order: TokenOrder
    log_count: bool
    impl: Impl

    def build(self, context: Context, mask: Mask = None, *, check: bool = True) -> Tree:
        """Build the tree over `context`, with keys and values of all nodes.

        `mask` is True where a token is real: the tree is that of the real tokens alone, in their order.
        """
        if check:
            check_context(self, self.block, context, mask)
        if self.correction is not None:
            tree = self._corrected(without_padding(context, mask), mask)
        elif self.aggregator is None:
            tree = self._means(without_padding(context, mask), mask)
        else:
            tree = self._aggregated(context, mask)
        if not self.log_count:
            return tree
        counts = log_counts(tree.plan, tree.mask, tree.keys)
        return replace(tree, log_count=counts, counted=counted_keys(tree.keys, counts))

    def _means(self, context: Context, mask: Mask) -> Tree:
        """Nodes are means of keys and values."""
        pair = self._key_values(context)
        (keys, values), mask, order = self._in_leaf_order(pair, pair[0], mask)
        plan, keys, values, node_mask = mean_tree(keys, values, self.branch, mask)
        return Tree(plan, None, node_mask, keys, values, order=order)

    def _aggregated(self, context: Context, mask: Mask) -> Tree:
        """Keys and values of nodes are those of their embeddings."""
        keys = self._key_values(without_padding(context, mask))[0] if self.order == "keys" else context
        (context,), mask, order = self._in_leaf_order((context,), keys, mask)
        plan, nodes, node_mask = self._embeddings(context, mask)
        keys, values = self._key_values(nodes)
        return Tree(plan, nodes, node_mask, keys, values, order=order)

    def _corrected(self, context: Context, mask: Mask) -> Tree:
        """Nodes are means of keys and values, and above the lowest levels what `correction` makes of embeddings."""
        assert self.correction is not None
        pair = self._key_values(context)
        (keys, values, context), mask, order = self._in_leaf_order((*pair, context), pair[0], mask)
        plan, keys, values, node_mask = mean_tree(keys, values, self.branch, mask)
        nodes = self._embeddings(context, mask)[1]
        top = plan.offsets[max(1, plan.depth + 1 - self.mean_levels)]  # nodes of the levels above
        if top:
            more = self.block.split_heads(self.correction(nodes[:, :top]))
            keys, values = (
                torch.cat([means[:, :top] + part, means[:, top:]], dim=1)
                for means, part in zip((keys, values), more, strict=True)
            )
        return Tree(plan, nodes, node_mask, keys, values, order=order)

    def _embeddings(self, context: Context, mask: Mask) -> tuple[TreePlan, Tensor, Tensor | None]:
        if self.aggregator is None:
            return mean_nodes(context, self.branch, mask)
        return build_nodes(
            context, self.aggregator, self.branch, mask, self.detach, self.impl, mean_levels=self.mean_levels
        )

    def _in_leaf_order(
        self, tokens: Sequence[Tensor], keys: Tensor, mask: Mask
    ) -> tuple[Sequence[Tensor], Mask, Int[Tensor, "b n"] | None]:
        """`tokens` (b, n, ...) and mask in leaf order, and that order; it is found from `keys` if the module sorts."""
        if self.order == "keys":
            order = permutation_of("principal", keys.detach().flatten(2), mask, self.branch, 0, 0)
            return [in_order(part, order) for part in tokens], None if mask is None else in_order(mask, order), order
        return tokens, mask, None if mask is None else permutation_of("given", keys, mask, self.branch, 0, 0)

    def _key_values(self, tokens: Float[Tensor, "b t d"]) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens or nodes; by one kernel where the layers are plain."""
        if choose("aggregate", self.impl, tokens) != "reference":
            weights = plain_projection(self.block)
            if weights is not None and projects(tokens, weights):
                return self.block.split_heads(project(tokens, weights))
        return self.block.key_values(tokens)
