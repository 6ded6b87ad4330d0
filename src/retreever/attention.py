"""`TreeCrossAttention`, which reads O(log n) tokens per query, or as many as a budget allows.

Like `CrossAttention` it works in two steps, so that a context is prepared once and queried often:

    memory = module.build(context, mask)    # keys and values, or a tree
    result = module(query, memory)          # any number of times; result.output is (b, m, dim)

Both steps check their arguments; `check=False` skips the checks, for models that have checked their inputs already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.attention_build import TOKEN_ORDERS, TokenOrder, build_tree, key_values, makers, stamped
from retreever.attention_growing import GrowingAttention
from retreever.attention_inputs import check_budget, check_context, check_search, shard_error
from retreever.attention_search import Decisions, read_tree, result_of, search_tree, unsearched
from retreever.batch import without_padding
from retreever.cross_attention import Context, CrossAttention, Mask, Query, readout
from retreever.fidelity import Fidelity, measure
from retreever.growing import build_growing
from retreever.growing_inputs import check_plain
from retreever.nn.blocks import Residual
from retreever.nn.multihead import block_arguments, copy_multihead, multihead_arguments
from retreever.ops.backend import Impl
from retreever.results import RETRIEVALS, Retrieval, TreeCrossAttentionResult
from retreever.sharded.build import build_for
from retreever.sharded.tree import ShardedTree
from retreever.sharded.wire import Wire
from retreever.tree.aggregate import Aggregator, Correction, make_aggregator
from retreever.tree.stamp import Stamp
from retreever.tree.value import Tree

Noise = Float[Tensor, "b m depth"] | None
Choices = Int[Tensor, "b m depth"] | None


class TreeCrossAttention(GrowingAttention):
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
        correct: nodes are means of keys and values, plus a learned correction from the aggregator's embeddings, which
            is 0 at first; with it "mean" learns too.
        mean_levels: lowest levels whose nodes are means, without aggregator or correction: building costs the fewer.
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
        correct: bool = False,
        mean_levels: int = 0,
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
        check_int("mean_levels", mean_levels, 0)
        check_bool("correct", correct)
        check_bool("log_count", log_count)
        check_choice("order", order, TOKEN_ORDERS)
        self.block = readout(dim, heads, kdim, hidden, residual, dropout, bias, impl)
        width = dim if kdim is None else kdim
        if aggregator == "transformer" and width % heads:
            reject("heads", f"a divisor of kdim={width}, for the transformer aggregator", heads)
        inner: Residual = "normalised" if residual == "doubled" else "pre" if residual == "none" else residual
        self.aggregator = make_aggregator(aggregator, width, heads, hidden or 2 * width, inner, dropout, impl)
        self.correction = Correction(width, 2 * dim, 2 * dim) if correct else None
        self.branch, self.detach, self.mean_levels = branch, detach, mean_levels
        self.retrieval: Retrieval = retrieval
        self.budget, self.log_count = budget, log_count
        self.order: TokenOrder = order
        self.impl: Impl = impl

    @classmethod
    def from_multihead(
        cls,
        attention: nn.MultiheadAttention,
        branch: int = 2,
        *,
        order: TokenOrder = "keys",
        budget: int | None = None,
        aggregator: Aggregator | nn.Module = "mean",
        **more: Any,
    ) -> TreeCrossAttention:
        """Read a trained `nn.MultiheadAttention(batch_first=True)` through a tree of means. Nothing has to be trained.

        The nodes are means of its keys and values with the log of their counts, so any `budget` approximates it and one
        of all tokens is equal to it; `fidelity` measures how well. The attention has no dropout, since it is also the
        policy. The module is in the mode of `attention`: in training it samples its paths.

        Another `aggregator` than "mean" learns a correction of the means (`correct=True`), which starts at 0; `more`
        are further settings of the module.
        """
        arguments = multihead_arguments(attention) | {"dropout": 0.0}
        module = cls(**_with_means(arguments, more, branch, order, budget, aggregator))
        copy_multihead(attention, module.to(attention.out_proj.weight).block)
        return module.train(attention.training)

    @classmethod
    def from_cross_attention(
        cls,
        attention: CrossAttention,
        branch: int = 2,
        *,
        order: TokenOrder = "keys",
        budget: int | None = None,
        aggregator: Aggregator | nn.Module = "mean",
        **more: Any,
    ) -> TreeCrossAttention:
        """Read a trained `CrossAttention` through a tree of means, as `from_multihead` does."""
        if not isinstance(attention, CrossAttention):
            reject("attention", "a CrossAttention", type(attention).__name__)
        module = cls(**_with_means(block_arguments(attention.block), more, branch, order, budget, aggregator))
        module.to(attention.block.to_out.weight).block.load_state_dict(attention.block.state_dict())
        return module.train(attention.training)

    def build(self, context: Context, mask: Mask = None, *, capacity: int | None = None, check: bool = True) -> Tree:
        """Build the tree over `context`, with keys and values of all nodes.

        Args:
            context: the tokens.
            mask: True where a token is real: the tree is that of the real tokens alone, in their order.
            capacity: make a tree that grows, with room for at least so many tokens. They are packed from the left in
                the order given: token i lies on leaf slot i, and a masked one leaves its slot empty. None spreads
                tokens evenly over the leaf blocks.
            check: False skips the checks of all arguments.
        """
        if check:
            check_context(self, self.block, context, mask)
            if capacity is not None:
                check_int("capacity", capacity, 1)
                check_plain(self, "capacity")
                if self.order == "keys":
                    reject("capacity", "None where tokens are sorted by keys: append puts new ones beside", capacity)
        if capacity is None:
            return build_tree(self, context, mask, None)
        return build_growing(self, context, mask, capacity)

    def build_sharded(self, context: Context, mesh: DeviceMesh, mask: Mask = None) -> ShardedTree:
        """Build one tree over the tokens of all processes of `mesh`; every process calls this with its own.

        The tree is that of the first process's tokens, then the second's, and so on, in leaf order; a process may have
        none. All processes call it together, each with queries of its own, and run `backward` together: paths, outputs
        and gradients are those of one process. `mesh` has one dimension; all contexts have the same number of rows.
        """
        check_plain(self, "context")
        wire = Wire(mesh)
        wire.agree(shard_error(self, self.block, context, mask))
        tree = build_for(self, without_padding(context, mask), mask, wire, partial(key_values, self))
        return replace(tree, stamp=Stamp.of(self, makers(self))) if stamped() else tree

    def forward(
        self,
        query: Query,
        tree: Tree | ShardedTree,
        noise: Noise = None,
        choices: Choices = None,
        generator: torch.Generator | None = None,
        *,
        budget: int | None = None,
        leaves: bool | int = False,
        sample: bool | None = None,
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
            leaves: also read all leaves with the same weights, as training does (`result.leaves`); a number does so for
                the first queries of every row alone.
            sample: whether paths are sampled; None does so in training.
            check: False skips the checks of all arguments.
        """
        if check:
            check_choice("retrieval", self.retrieval, RETRIEVALS)
            check_search(self, self.block, query, tree, noise, choices)
            check_budget(budget)
        if tree.stamp is not None and stamped():
            tree.stamp.check(self, lambda: makers(self))
        normed, q = self.block.start(query)
        q = q.to(tree.keys.dtype)  # under autocast the tree may have another dtype
        if self.retrieval == "full" and not leaves:
            read = unsearched(self, q, tree)
            return result_of(self.block.finish(query, normed, read.first.output), read, tree, "full")
        decisions = Decisions(noise, choices, generator, self.training if sample is None else sample)
        found = search_tree(self, q, tree, decisions, self.budget if budget is None else budget)
        if not leaves:
            return result_of(self.block.finish(query, normed, found.first.output), found, tree, "policy")
        # One pass of the feed-forward for both outputs: they share all layers after the attention.
        m = query.shape[1]
        first = slice(m if leaves is True else leaves)
        attended = torch.cat([found.first.output, read_tree(self, q[:, first], tree)], dim=1)
        queries, norms = (torch.cat([part, part[:, first]], dim=1) for part in (query, normed))
        both = self.block.finish(queries, norms, attended)
        return result_of(both[:, :m], found, tree, "policy", both[:, m:])

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


def _with_means(
    trained: dict[str, Any],
    more: dict[str, Any],
    branch: int,
    order: TokenOrder,
    budget: int | None,
    aggregator: Aggregator | nn.Module,
) -> dict[str, Any]:
    """Settings of `trained` attention with a tree of means, corrected where the aggregator learns, and `more`."""
    for name in trained.keys() & more:
        reject(name, f"{trained[name]!r}, as the attention has it, or nothing", repr(more[name]))
    tree: dict[str, Any] = {"branch": branch, "order": order, "budget": budget, "aggregator": aggregator}
    return {**trained, **tree, "log_count": True, "correct": aggregator != "mean", **more}
