"""The attention modules: `CrossAttention` and `TreeCrossAttention`, which reads O(log n) tokens per query.

Both work in two steps, so that a context is prepared once and queried often:

    memory = module.build(context, mask)    # keys and values, or a tree
    result = module(query, memory)          # any number of times; result.output is (b, m, dim)

Both steps check their arguments; `check=False` skips the checks, for models that have checked their inputs already.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.attention_inputs import check_context, check_query, check_search
from retreever.nn.blocks import AttentionBlock, Residual
from retreever.nn.multihead import copy_multihead, multihead_arguments
from retreever.ops.backend import Impl
from retreever.ops.search.api import TreeAttention, read_leaves, search
from retreever.ops.search.inputs import SearchInputs
from retreever.results import RETRIEVALS, CrossAttentionResult, KeyValues, Retrieval, TreeCrossAttentionResult
from retreever.tree.aggregate import Aggregator, make_aggregator
from retreever.tree.build import Tree, build_nodes

Query = Float[Tensor, "b m d"]
Context = Float[Tensor, "b n c"]
Mask = Bool[Tensor, "b n"] | None
Noise = Float[Tensor, "b m depth"] | None
Choices = Int[Tensor, "b m depth"] | None


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
        impl: backend of the attention.
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
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.block = _readout(dim, heads, kdim, hidden, residual, dropout, bias, impl)

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention) -> CrossAttention:
        """A module that computes the same as a trained `nn.MultiheadAttention(batch_first=True)`."""
        module = cls(**multihead_arguments(attention)).to(attention.out_proj.weight)
        copy_multihead(attention, module.block)
        return module.train(attention.training)

    def build(self, context: Context, mask: Mask = None, *, check: bool = True) -> KeyValues:
        """Project `context` to keys and values. `mask` is True where a token is real.

        With `check=False` padding must hold finite numbers.
        """
        if check:
            check_context(self, self.block, context, mask)
            if mask is not None:  # padding may hold NaN, and 0 * NaN is NaN
                context = context.masked_fill(~mask[..., None], 0)
        return KeyValues(*self.block.key_values(context), mask)

    def forward(
        self, query: Query, context: KeyValues | Context, mask: Mask = None, *, check: bool = True
    ) -> CrossAttentionResult:
        """Attend from `query` to `context`, prepared by `build` or as plain tokens with their mask."""
        memory = context if isinstance(context, KeyValues) else self.build(context, mask, check=check)
        if check:
            check_query(self, self.block, query, memory.keys)
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
        impl: which kernels run; "reference" runs none.
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
        check_bool("detach", detach)
        self.block = _readout(dim, heads, kdim, hidden, residual, dropout, bias, impl)
        width = dim if kdim is None else kdim
        if aggregator == "transformer" and width % heads:
            reject("heads", f"a divisor of kdim={width}, for the transformer aggregator", heads)
        inner: Residual = "normalised" if residual == "doubled" else "pre" if residual == "none" else residual
        self.aggregator = make_aggregator(aggregator, width, heads, hidden or 2 * width, inner, dropout, impl)
        self.branch, self.detach = branch, detach
        self.retrieval: Retrieval = retrieval
        self.impl: Impl = impl

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, branch: int = 2) -> TreeCrossAttention:
        """A module with the weights of an `nn.MultiheadAttention(batch_first=True)`; equal to it if `branch` >= tokens.

        Nodes are the means of their children. The attention has no dropout, since it is also the policy. The module is
        in the mode of `attention`: in training it samples its paths.
        """
        arguments = multihead_arguments(attention) | {"dropout": 0.0}
        module = cls(**arguments, branch=branch, aggregator="mean").to(attention.out_proj.weight)
        copy_multihead(attention, module.block)
        return module.train(attention.training)

    def build(self, context: Context, mask: Mask = None, *, check: bool = True) -> Tree:
        """Build the tree over `context`, already in leaf order, with keys and values of all nodes.

        `mask` is True where a token is real: the tree is that of the real tokens alone, in their order.
        """
        if check:
            check_context(self, self.block, context, mask)
        plan, nodes, node_mask = build_nodes(context, self.aggregator, self.branch, mask, self.detach, self.impl)
        return Tree(plan, nodes, node_mask, *self.block.key_values(nodes))

    def forward(
        self,
        query: Query,
        tree: Tree,
        noise: Noise = None,
        choices: Choices = None,
        generator: torch.Generator | None = None,
        *,
        leaves: bool = False,
        check: bool = True,
    ) -> TreeCrossAttentionResult:
        """Answer `query` from `tree`.

        Args:
            query: the queries.
            tree: made by `build`.
            noise: uniforms in [0, 1), one per decision, by which paths are sampled. Without it paths are sampled in
                training and the most likely child is taken in evaluation.
            choices: the child to take at single decisions; -1 leaves them to the policy.
            generator: of the noise drawn in training.
            leaves: also read all leaves with the same weights, as training does (`result.leaves`).
            check: False skips the checks of all arguments.
        """
        if check:
            check_choice("retrieval", self.retrieval, RETRIEVALS)
            check_search(self, self.block, query, tree, noise, choices)
        normed, q = self.block.start(query)
        q = q.to(tree.keys.dtype)  # under autocast the tree may have another dtype
        if self.retrieval == "full" and not leaves:
            nothing = q.new_zeros(q.shape[:2])
            found = TreeAttention(self._read_leaves(q, tree), nothing.to(torch.int64), nothing, nothing)
            return _result(self.block.finish(query, normed, found.output), found, tree, "full")
        found = self._search(q, tree, noise, choices, generator)
        if not leaves:
            return _result(self.block.finish(query, normed, found.output), found, tree, "policy")
        # One pass of the feed-forward for both outputs: they share all layers after the attention.
        attended = torch.cat([found.output, self._read_leaves(q, tree)])
        both = self.block.finish(torch.cat([query, query]), torch.cat([normed, normed]), attended)
        return _result(both[: len(query)], found, tree, "policy", both[len(query) :])

    def _read_leaves(self, q: Float[Tensor, "b m h e"], tree: Tree) -> Float[Tensor, "b m h e"]:
        return read_leaves(q, tree.keys, tree.values, tree.plan, tree.mask, self.impl)

    def _search(
        self, q: Float[Tensor, "b m h e"], tree: Tree, noise: Noise, choices: Choices, generator: torch.Generator | None
    ) -> TreeAttention:
        if noise is None and self.training:
            noise = torch.rand(*q.shape[:2], tree.plan.depth, device=q.device, generator=generator)
        return search(SearchInputs(q, tree.keys, tree.values, tree.plan, tree.mask, noise, choices), self.impl)


def _result(
    output: Query, found: TreeAttention, tree: Tree, retrieval: Retrieval, leaves: Query | None = None
) -> TreeCrossAttentionResult:
    return TreeCrossAttentionResult(
        output, found.path, found.log_prob, found.entropy, tree.plan, tree.mask, retrieval, leaves
    )


def _readout(
    dim: int,
    heads: int,
    kdim: int | None,
    hidden: int | None,
    residual: Residual,
    dropout: float,
    bias: bool,
    impl: Impl,
) -> AttentionBlock:
    """The block of both modules. Only with `residual` "pre" the context has a norm; the paper's code has none."""
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
        impl=impl,
    )
