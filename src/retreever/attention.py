"""`TreeCrossAttention`, which reads O(log n) tokens per query, or as many as a budget allows.

Like `CrossAttention` it works in two steps, so that a context is prepared once and queried often:

    memory = module.build(context, mask)    # keys and values, or a tree
    result = module(query, memory)          # any number of times; result.output is (b, m, dim)

Both steps check their arguments; `check=False` skips the checks, for models that have checked their inputs already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.attention_inputs import check_budget, check_context, check_search, shard_error
from retreever.batch import without_padding
from retreever.cross_attention import Context, CrossAttention, Mask, Query, readout
from retreever.fidelity import Fidelity, measure
from retreever.nn.blocks import Residual
from retreever.nn.multihead import block_arguments, copy_multihead, multihead_arguments
from retreever.nn.plain import plain_projection
from retreever.ops.aggregate.api import project, projects
from retreever.ops.backend import Impl, choose
from retreever.ops.search.api import TreeAttention, counted_keys, read_leaves, search
from retreever.ops.search.inputs import SearchInputs
from retreever.results import RETRIEVALS, Retrieval, TreeCrossAttentionResult
from retreever.sharded.build import build_for
from retreever.sharded.search import read_leaves_sharded, search_sharded
from retreever.sharded.tree import ShardedTree
from retreever.sharded.wire import Wire
from retreever.tree.aggregate import Aggregator, make_aggregator
from retreever.tree.build import Tree, build_nodes
from retreever.tree.means import log_counts, mean_tree
from retreever.tree.order import in_order, permutation_of

TokenOrder = Literal["given", "keys"]
TOKEN_ORDERS: tuple[TokenOrder, ...] = ("given", "keys")
Noise = Float[Tensor, "b m depth"] | None
Choices = Int[Tensor, "b m depth"] | None


class TreeCrossAttention(nn.Module):
    """Cross attention that walks a tree and reads (branch - 1) * depth + one leaf block tokens per query.

    The policy that walks the tree is the attention itself: same weights, same scores.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim` (and `kdim`, for the transformer aggregator).
        branch: children per node; more branches, fewer levels, more tokens.
        kdim: width of the context; None means `dim`.
        hidden: feed-forward width; None means 2 * dim, 0 leaves it out.
        aggregator: "transformer" (one layer among the children, then the mean), "mean" (of the keys and values of all
            tokens below, by sums alone), or your own module (children (g, k, kdim), mask (g, k) or None) -> (g, kdim).
        detach: cut gradients between tree levels.
        retrieval: "policy" searches; "full" reads all leaves with the same weights (ReTreever-Full).
        budget: how many tokens a query may read, one path at least; None reads one path.
        log_count: add the logarithm of its number of tokens to the score of a node, so that a mean stands for all.
        order: "given" takes tokens in leaf order; "keys" puts tokens with similar keys side by side.
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
        budget: int | None = None,
        log_count: bool = False,
        order: TokenOrder = "given",
        residual: Residual = "pre",
        dropout: float = 0.0,
        bias: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_int("branch", branch, 2)
        check_choice("retrieval", retrieval, RETRIEVALS)
        check_bool("detach", detach)
        check_budget(budget)
        check_bool("log_count", log_count)
        check_choice("order", order, TOKEN_ORDERS)
        self.block = readout(dim, heads, kdim, hidden, residual, dropout, bias, impl)
        width = dim if kdim is None else kdim
        if aggregator == "transformer" and width % heads:
            reject("heads", f"a divisor of kdim={width}, for the transformer aggregator", heads)
        inner: Residual = "normalised" if residual == "doubled" else "pre" if residual == "none" else residual
        self.aggregator = make_aggregator(aggregator, width, heads, hidden or 2 * width, inner, dropout, impl)
        self.branch, self.detach = branch, detach
        self.retrieval: Retrieval = retrieval
        self.budget, self.log_count = budget, log_count
        self.order: TokenOrder = order
        self.impl: Impl = impl

    @classmethod
    def from_multihead(
        cls, attention: nn.MultiheadAttention, branch: int = 2, *, order: TokenOrder = "keys", budget: int | None = None
    ) -> TreeCrossAttention:
        """Read a trained `nn.MultiheadAttention(batch_first=True)` through a tree of means. Nothing has to be trained.

        The nodes are means of its keys and values with the log of their counts, so any `budget` approximates it and one
        of all tokens is equal to it; `fidelity` measures how well. The attention has no dropout, since it is also the
        policy. The module is in the mode of `attention`: in training it samples its paths.
        """
        module = cls(**multihead_arguments(attention) | {"dropout": 0.0}, **_means(branch, order, budget))
        copy_multihead(attention, module.to(attention.out_proj.weight).block)
        return module.train(attention.training)

    @classmethod
    def from_cross_attention(
        cls, attention: CrossAttention, branch: int = 2, *, order: TokenOrder = "keys", budget: int | None = None
    ) -> TreeCrossAttention:
        """Read a trained `CrossAttention` through a tree of means, as `from_multihead` does."""
        if not isinstance(attention, CrossAttention):
            reject("attention", "a CrossAttention", type(attention).__name__)
        module = cls(**block_arguments(attention.block), **_means(branch, order, budget))
        module.to(attention.block.to_out.weight).block.load_state_dict(attention.block.state_dict())
        return module.train(attention.training)

    def build(self, context: Context, mask: Mask = None, *, check: bool = True) -> Tree:
        """Build the tree over `context`, with keys and values of all nodes.

        `mask` is True where a token is real: the tree is that of the real tokens alone, in their order.
        """
        if check:
            check_context(self, self.block, context, mask)
        if self.aggregator is None:
            pair = self._key_values(without_padding(context, mask))
            (keys, values), mask, order = self._in_leaf_order(pair, pair[0], mask)
            plan, keys, values, node_mask = mean_tree(keys, values, self.branch, mask)
            nodes = None
        else:
            sorts = self.order == "keys"
            keys = self._key_values(without_padding(context, mask))[0] if sorts else context
            (context,), mask, order = self._in_leaf_order((context,), keys, mask)
            plan, nodes, node_mask = build_nodes(context, self.aggregator, self.branch, mask, self.detach, self.impl)
            keys, values = self._key_values(nodes)
        tree = Tree(plan, nodes, node_mask, keys, values, order=order)
        if not self.log_count:
            return tree
        counts = log_counts(plan, node_mask, keys)
        return replace(tree, log_count=counts, counted=counted_keys(keys, counts))

    def build_sharded(self, context: Context, mesh: DeviceMesh, mask: Mask = None) -> ShardedTree:
        """Build one tree over the tokens of all processes of `mesh`; every process calls this with its own.

        The tree is that of the first process's tokens, then the second's, and so on, in leaf order; a process may have
        none. All processes call it together, each with queries of its own, and run `backward` together: paths, outputs
        and gradients are those of one process. `mesh` has one dimension; all contexts have the same number of rows.
        """
        wire = Wire(mesh)
        wire.agree(shard_error(self, self.block, context, mask))
        return build_for(self, without_padding(context, mask), mask, wire)

    def forward(
        self,
        query: Query,
        tree: Tree | ShardedTree,
        noise: Noise = None,
        choices: Choices = None,
        generator: torch.Generator | None = None,
        *,
        budget: int | None = None,
        leaves: bool = False,
        check: bool = True,
    ) -> TreeCrossAttentionResult:
        """Answer `query` from `tree`.

        Args:
            query: the queries.
            tree: made by `build` or `build_sharded`.
            noise: uniforms in [0, 1), one per decision, by which paths are sampled. Without it paths are sampled in
                training and the most likely child is taken in evaluation.
            choices: the child to take at single decisions; -1 leaves them to the policy.
            generator: of the noise drawn in training.
            budget: how many tokens a query may read; None takes that of the module.
            leaves: also read all leaves with the same weights, as training does (`result.leaves`).
            check: False skips the checks of all arguments.
        """
        if check:
            check_choice("retrieval", self.retrieval, RETRIEVALS)
            check_search(self, self.block, query, tree, noise, choices)
            check_budget(budget)
        block = self.block
        normed, q = block.start(query)
        q = q.to(tree.keys.dtype)  # under autocast the tree may have another dtype
        if self.retrieval == "full" and not leaves:
            nothing = q.new_zeros(q.shape[:2])
            found = TreeAttention(self._read_leaves(q, tree), nothing.to(torch.int64), nothing, nothing)
            return _result(block.finish(query, normed, found.output), found, tree, "full")
        found = self._search(q, tree, noise, choices, generator, self.budget if budget is None else budget)
        if not leaves:
            return _result(block.finish(query, normed, found.output), found, tree, "policy")
        # One pass of the feed-forward for both outputs: they share all layers after the attention.
        attended = torch.cat([found.output, self._read_leaves(q, tree)])
        both = block.finish(torch.cat([query, query]), torch.cat([normed, normed]), attended)
        return _result(both[: len(query)], found, tree, "policy", both[len(query) :])

    def fidelity(
        self,
        queries: Query,
        context: Context,
        mask: Mask = None,
        budgets: Sequence[int | None] | None = None,
        error: float = 0.05,
    ) -> Fidelity:
        """Measure error, tokens read and time of `budgets` against attention over all tokens. `print` shows a table.

        `budget` of the result is the smallest one whose error is at most `error`. Measures in evaluation mode, without
        gradients; the module is not changed.

        Args:
            queries: queries like those that will be asked.
            context: contexts like those that will be read.
            mask: True where a token is real.
            budgets: ascending numbers of tokens; None in front measures one path too. Without budgets, powers of two
                that suit the number of tokens. All tokens are always measured.
            error: largest relative error of the output that is acceptable.
        """
        return measure(self, queries, context, mask, budgets, error)

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

    def _read_leaves(self, q: Float[Tensor, "b m h e"], tree: Tree | ShardedTree) -> Float[Tensor, "b m h e"]:
        if isinstance(tree, ShardedTree):
            return read_leaves_sharded(q, tree)
        return read_leaves(q, tree.keys, tree.values, tree.plan, tree.mask, self.impl)

    def _search(
        self,
        q: Float[Tensor, "b m h e"],
        tree: Tree | ShardedTree,
        noise: Noise,
        choices: Choices,
        generator: torch.Generator | None,
        budget: int | None,
    ) -> TreeAttention:
        if noise is None and self.training:
            noise = torch.rand(*q.shape[:2], tree.plan.depth, device=q.device, generator=generator)
        if isinstance(tree, ShardedTree):
            return search_sharded(q, tree, noise, choices, budget, self.impl)
        inputs = SearchInputs(
            q, tree.keys, tree.values, tree.plan, tree.mask, noise, choices, tree.log_count, tree.counted
        )
        return search(inputs, self.impl, budget)


def _means(branch: int, order: TokenOrder, budget: int | None) -> dict[str, Any]:
    """Settings of a tree of means."""
    return {"branch": branch, "order": order, "budget": budget, "aggregator": "mean", "log_count": True}


def _result(
    output: Query, found: TreeAttention, tree: Tree | ShardedTree, retrieval: Retrieval, leaves: Query | None = None
) -> TreeCrossAttentionResult:
    return TreeCrossAttentionResult(
        output,
        found.path,
        found.log_prob,
        found.entropy,
        tree.plan,
        tree.mask,
        retrieval,
        leaves,
        found.rows,
        tree.order,
    )
