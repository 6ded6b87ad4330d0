"""The two modules a user drops in: `CrossAttention` and, reading O(log n) tokens instead, `TreeCrossAttention`.

Both work in two steps, because a context is prepared once and queried often:

    memory = module.build(context, mask)    # keys and values, or a tree
    result = module(query, memory)          # as often as wanted; result.output is (b, m, dim)
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.checks import (
    check_any_real,
    check_finite,
    check_float,
    check_mask,
    check_same,
    check_tensor,
    values_readable,
)
from retreever.nn.blocks import AttentionBlock, Residual
from retreever.nn.multihead import copy_multihead, multihead_arguments
from retreever.ops.api import IMPLS, Impl, TreeAttention, full_attention, tree_attention
from retreever.results import (
    RETRIEVALS,
    CrossAttentionResult,
    KeyValues,
    Retrieval,
    TreeCrossAttentionResult,
)
from retreever.tree.aggregate import Aggregator, make_aggregator
from retreever.tree.build import Tree, build_nodes


class CrossAttention(nn.Module):
    """Cross attention over all tokens: norm, attention, residual and feed-forward.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim`.
        kdim: width of the context; None means `dim`.
        hidden: feed-forward width; None means 2 * dim, 0 leaves it out.
        residual: see `AttentionBlock`; "none" with `hidden=0` is bare multi-head attention.
        dropout: on attention weights and feed-forward.
        bias: of the query, key and value projections.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        kdim: int | None = None,
        hidden: int | None = None,
        residual: Residual = "pre",
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.block = _readout(dim, heads, kdim, hidden, residual, dropout, bias)

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention) -> CrossAttention:
        """The same function as a trained `nn.MultiheadAttention(batch_first=True)` used as cross attention."""
        module = cls(**multihead_arguments(attention)).to(attention.out_proj.weight)
        copy_multihead(attention, module.block)
        return module.train(attention.training)

    def build(self, context: Float[Tensor, "b n c"], mask: Bool[Tensor, "b n"] | None = None) -> KeyValues:
        """Project `context` once, to be queried often. `mask` is True where a token is real."""
        check_tensor("context", context, "b n c", c=self.block.to_kv.in_features)
        _check_like_weights("context", context, self.block)
        if context.shape[1] == 0:
            reject("context", "at least one token", tuple(context.shape))
        if mask is not None:
            check_mask("mask", mask, "b n", b=context.shape[0], n=context.shape[1])
            check_same("mask", mask, "context", context, dtype=False)
            check_any_real("mask", mask)
            context = context.masked_fill(~mask[..., None], 0)  # NaN in padding must not spread: 0 * NaN is NaN
        check_finite("context", context)
        return KeyValues(*self.block.key_values(context), mask)

    def forward(
        self,
        query: Float[Tensor, "b m d"],
        context: KeyValues | Float[Tensor, "b n c"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> CrossAttentionResult:
        """Attend from `query` to `context`, prepared by `build` or as plain tokens with their mask."""
        memory = context if isinstance(context, KeyValues) else self.build(context, mask)
        _check_query(query, memory.keys, self.block)
        normed, q = self.block.start(query)
        attended = self.block.attend(q.to(memory.keys.dtype), memory.keys, memory.values, memory.mask)
        return CrossAttentionResult(self.block.finish(query, normed, attended), tokens=memory.keys.shape[1])


class TreeCrossAttention(nn.Module):
    """Cross attention that walks a tree and reads (branch - 1) * depth + one leaf block tokens per query.

    The policy that walks the tree is the attention itself: same weights, same scores.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim` (and `kdim`, for the transformer aggregator).
        branch: children per node; more branches, fewer levels, more tokens.
        kdim: width of the context; None means `dim`.
        hidden: feed-forward width; None means 2 * dim, 0 leaves it out.
        aggregator: "transformer" (one layer among the children, then the mean), "mean", or your own module
            (children (g, k, kdim), mask (g, k) or None) -> (g, kdim).
        detach: cut gradients between tree levels.
        retrieval: "policy" searches; "full" reads all leaves with the same weights (ReTreever-Full).
        residual: see `AttentionBlock`; "none" with `hidden=0` is bare attention.
        dropout: on feed-forward and aggregator; the attention itself has none, since it is also the policy.
        bias: of the query, key and value projections.
        impl: backend of the operator.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        branch: int = 2,
        *,
        kdim: int | None = None,
        hidden: int | None = None,
        aggregator: Aggregator | nn.Module = "transformer",
        detach: bool = False,
        retrieval: Retrieval = "policy",
        residual: Residual = "pre",
        dropout: float = 0.0,
        bias: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_int("branch", branch, 2)
        check_choice("retrieval", retrieval, RETRIEVALS)
        check_choice("impl", impl, IMPLS)
        check_bool("detach", detach)
        self.block = _readout(dim, heads, kdim, hidden, residual, dropout, bias)
        width = dim if kdim is None else kdim
        if aggregator == "transformer" and width % heads:
            reject("heads", f"a divisor of kdim={width}, for the transformer aggregator", heads)
        inner: Residual = "normalised" if residual == "doubled" else "pre" if residual == "none" else residual
        self.aggregator = make_aggregator(aggregator, width, heads, hidden or 2 * width, inner, dropout)
        self.branch, self.detach, self.retrieval, self.impl = branch, detach, retrieval, impl

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, branch: int = 2) -> TreeCrossAttention:
        """Start from a trained `nn.MultiheadAttention(batch_first=True)`: equal to it when `branch` >= tokens.

        Nodes are the means of their children, without weights of their own. The attention has no dropout, since it is
        also the policy, and the module is in the mode of `attention`: in training it samples its paths.
        """
        arguments = multihead_arguments(attention) | {"dropout": 0.0}
        module = cls(**arguments, branch=branch, aggregator="mean").to(attention.out_proj.weight)
        copy_multihead(attention, module.block)
        return module.train(attention.training)

    def build(self, context: Float[Tensor, "b n c"], mask: Bool[Tensor, "b n"] | None = None) -> Tree:
        """Lay `context`, already in leaf order, on a tree and prepare all nodes once.

        `mask` is True where a token is real: the tree is that of the real tokens alone, in their order.
        """
        check_tensor("context", context, "b n c", c=self.block.to_kv.in_features)
        _check_like_weights("context", context, self.block)
        plan, nodes, node_mask = build_nodes(context, self.aggregator, self.branch, mask, self.detach)
        return Tree(plan, nodes, node_mask, *self.block.key_values(nodes))

    def forward(
        self,
        query: Float[Tensor, "b m d"],
        tree: Tree,
        noise: Float[Tensor, "b m depth"] | None = None,
        generator: torch.Generator | None = None,
    ) -> TreeCrossAttentionResult:
        """Answer `query` from `tree`.

        In training paths are sampled, by `noise` (uniforms in [0, 1), one per decision; 2 + c takes child c) or fresh
        ones from `generator`; in evaluation the most likely child is taken unless `noise` is given.
        """
        normed, q = self._query_heads(query, tree)
        if self.retrieval == "full":
            return self._full_result(query, tree, normed, q)
        found = self._search(q, tree, noise, generator)
        return self._result(self.block.finish(query, normed, found.output), found, tree)

    def with_leaves(
        self,
        query: Float[Tensor, "b m d"],
        tree: Tree,
        noise: Float[Tensor, "b m depth"] | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[TreeCrossAttentionResult, Float[Tensor, "b m d"]]:
        """The searched result and, for the L_CA term, the output read over all leaves with the same weights."""
        normed, q = self._query_heads(query, tree)
        found = self._search(q, tree, noise, generator)
        leaves = full_attention(q, tree.keys, tree.values, tree.plan, tree.mask)
        # One pass of the feed-forward for both: they share everything after the attention.
        both = self.block.finish(
            torch.cat([query, query]), torch.cat([normed, normed]), torch.cat([found.output, leaves])
        )
        searched, over_leaves = both.chunk(2)
        return self._result(searched, found, tree), over_leaves

    def _query_heads(self, query: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        if not isinstance(tree, Tree):
            reject("tree", "a Tree made by build()", type(tree).__name__)
        check_choice("retrieval", self.retrieval, RETRIEVALS)
        _check_query(query, tree.keys, self.block)
        normed, q = self.block.start(query)
        return normed, q.to(tree.keys.dtype)  # under autocast the tree may have been made outside, or in another type

    def _search(self, q: Tensor, tree: Tree, noise: Tensor | None, generator: torch.Generator | None) -> TreeAttention:
        if noise is None and self.training:
            shape = (*q.shape[:2], tree.plan.depth)
            noise = torch.rand(shape, device=q.device, generator=generator)
        elif isinstance(noise, Tensor) and not noise.is_cuda:
            _check_uniforms(noise, tree.plan.branch)
        return tree_attention(q, tree.keys, tree.values, tree.plan, tree.mask, noise, self.impl)

    def _full_result(self, query: Tensor, tree: Tree, normed: Tensor, q: Tensor) -> TreeCrossAttentionResult:
        attended = full_attention(q, tree.keys, tree.values, tree.plan, tree.mask)
        nothing = q.new_zeros(q.shape[:2])
        found = TreeAttention(attended, nothing.to(torch.int64), nothing, nothing)
        return self._result(self.block.finish(query, normed, attended), found, tree, "full")

    @staticmethod
    def _result(
        output: Tensor, found: TreeAttention, tree: Tree, retrieval: Retrieval = "policy"
    ) -> TreeCrossAttentionResult:
        return TreeCrossAttentionResult(
            output, found.path, found.log_prob, found.entropy, tree.plan, tree.mask, retrieval
        )


def _readout(
    dim: int, heads: int, kdim: int | None, hidden: int | None, residual: Residual, dropout: float, bias: bool
) -> AttentionBlock:
    """The block both modules share. The paper's code reads raw keys and values; otherwise the context has its norm."""
    check_bool("bias", bias)
    return AttentionBlock(
        dim,
        heads,
        kdim=kdim,
        hidden=2 * dim if hidden is None else hidden,
        residual=residual,
        context_norm="own" if residual == "pre" else "none",
        dropout=dropout,
        bias=bias,
    )


def _check_query(query: Tensor, keys: Tensor, block: AttentionBlock) -> None:
    check_tensor("query", query, "b m d", b=keys.shape[0], d=block.to_q.in_features)
    check_same("query", query, "the context", keys, dtype=False)
    _check_like_weights("query", query, block)
    check_tensor("keys", keys, "b n h e", h=block.heads, e=block.to_q.out_features // block.heads)
    if not torch.is_autocast_enabled(query.device.type):
        check_same("query", query, "the context", keys)
    if not query.is_cuda:  # reading values there would make every call wait for the device
        check_finite("query", query)


def _check_uniforms(noise: Tensor, branch: int) -> None:
    if values_readable(noise) and noise.numel() and not bool(((noise >= 0) & (noise < 2 + branch)).all()):
        check_finite("noise", noise)
        span = f"numbers from {float(noise.min()):g} to {float(noise.max()):g}"
        reject("noise", f"uniforms in [0, 1), or 2 + c to take child c of {branch}", span)


def _check_like_weights(argument: str, value: Tensor, block: AttentionBlock) -> None:
    check_float(argument, value)
    check_same(argument, value, "the weights", block.to_q.weight, dtype=False)
    if not torch.is_autocast_enabled(value.device.type):
        check_same(argument, value, "the weights", block.to_q.weight)
