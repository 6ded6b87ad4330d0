"""How `TreeCrossAttention` reads a tree: by search or over all leaves, and through a second tree beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retreever.attention_build import TreeModule
from retreever.checks import drawn_from
from retreever.ops.frontier.api import Part, merge_parts, read_all
from retreever.ops.search.api import TreeAttention, read_leaves, search
from retreever.ops.search.inputs import SearchInputs
from retreever.results import Retrieval, TreeCrossAttentionResult
from retreever.sharded.search import read_leaves_sharded, search_sharded
from retreever.sharded.tree import ShardedTree
from retreever.tree.value import Tree

Heads = Float[Tensor, "b m h e"]
Output = Float[Tensor, "b m d"]


class Decisions(NamedTuple):
    """What fixes the paths of a search; what is None is left to the policy, or to chance with `sample`."""

    noise: Float[Tensor, "b m depth"] | None = None
    choices: Int[Tensor, "b m depth"] | None = None
    generator: torch.Generator | None = None
    sample: bool = False


class Found(NamedTuple):
    """A search, and that of the tree beside: output, log_prob and entropy are of both, path and rows of each."""

    first: TreeAttention
    beside: TreeAttention | None = None


def search_tree(
    module: TreeModule, q: Heads, tree: Tree | ShardedTree, decisions: Decisions, budget: int | None
) -> Found:
    """Search `tree` and the tree beside it; parts are merged exactly, by the log-sum-exp of their scores."""
    if isinstance(tree, ShardedTree):
        noise = _noise(q, tree, decisions)
        return Found(search_sharded(q, tree, noise, decisions.choices, budget, module.impl))
    if tree.beside is None:
        return Found(_search(module, q, tree, decisions, budget))
    first_budget, beside_budget = _split(budget, tree)
    first = _search(module, q, tree, decisions, first_budget, lse=True)
    beside = _search(module, q, tree.beside, decisions._replace(noise=None, choices=None), beside_budget, lse=True)
    assert first.lse is not None and beside.lse is not None
    output = merge_parts([Part(first.output, first.lse), Part(beside.output, beside.lse)]).output
    log_prob, entropy = first.log_prob + beside.log_prob, first.entropy + beside.entropy
    return Found(first._replace(output=output, log_prob=log_prob, entropy=entropy), beside)


def read_tree(module: TreeModule, q: Heads, tree: Tree | ShardedTree) -> Heads:
    """Attention to all leaves of `tree` and of the tree beside it."""
    if isinstance(tree, ShardedTree):
        return read_leaves_sharded(q, tree)
    if tree.beside is None:
        return read_leaves(q, tree.keys, tree.values, tree.plan, tree.mask, module.impl)
    trees = (tree, tree.beside)
    return merge_parts([read_all(SearchInputs(q, t.keys, t.values, t.plan, t.mask)) for t in trees]).output


def unsearched(module: TreeModule, q: Heads, tree: Tree | ShardedTree) -> Found:
    """All leaves, by no decision."""
    nothing = q.new_zeros(q.shape[:2])
    return Found(TreeAttention(read_tree(module, q, tree), nothing.to(torch.int64), nothing, nothing))


def result_of(
    output: Output, found: Found, tree: Tree | ShardedTree, retrieval: Retrieval, leaves: Output | None = None
) -> TreeCrossAttentionResult:
    """The result of a module for a search."""
    first = found.first
    beside = None
    if tree.beside is not None:
        searched = found.beside or first
        beside = result_of(output, Found(searched), tree.beside, retrieval)
    return TreeCrossAttentionResult(
        output,
        first.path,
        first.log_prob,
        first.entropy,
        tree.plan,
        tree.mask,
        retrieval,
        leaves,
        first.rows,
        tree.order,
        beside,
    )


def _search(
    module: TreeModule, q: Heads, tree: Tree, decisions: Decisions, budget: int | None, lse: bool = False
) -> TreeAttention:
    noise = _noise(q, tree, decisions)
    inputs = SearchInputs(
        q, tree.keys, tree.values, tree.plan, tree.mask, noise, decisions.choices, tree.log_count, tree.counted
    )
    return search(inputs, module.impl, budget, lse)


def _noise(q: Heads, tree: Tree | ShardedTree, decisions: Decisions) -> Tensor | None:
    """The noise given, or drawn."""
    if decisions.noise is not None or not decisions.sample:
        return decisions.noise
    return torch.rand(*q.shape[:2], tree.plan.depth, **drawn_from(decisions.generator, q.device)).to(q.device)


def _split(budget: int | None, tree: Tree) -> tuple[int | None, int | None]:
    """Shares of a budget for both trees, by their tokens; each reads one path at least."""
    assert tree.beside is not None
    if budget is None:
        return None, None
    beside = min(-(-budget * tree.beside.tokens // tree.tokens), tree.beside.tokens)
    return max(1, budget - beside), max(1, beside)
