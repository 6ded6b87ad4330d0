"""Searches of a tree over several processes: the crown is walked here, the rest where it lies; parts merge by lse.

All processes call these functions together, each with queries of its own, possibly none. A query visits one subtree,
under a budget several, and returns with attention to what it read there and the log-sum-exp of its scores. What
travels depends on the width of a query and on the budget, not on the number of tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retreever.ops.backend import Impl
from retreever.ops.frontier.api import Part, attend_part, merge_parts, read_rows
from retreever.ops.search.api import TreeAttention, search
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import Descent, descend
from retreever.sharded.budget import open_budget, read_visited
from retreever.sharded.tree import ShardedTree
from retreever.sharded.visit import Packing, Visit, nothing
from retreever.tree.selected import selected_nodes

Queries = Float[Tensor, "b m h e"]
Decisions = Tensor | None  # noise or choices (b, m, depth)


def search_sharded(
    q: Queries, tree: ShardedTree, noise: Decisions, choices: Decisions, budget: int | None, impl: Impl
) -> TreeAttention:
    """`tree_attention` over all processes; rows of nodes are those of the whole tree."""
    top = crown_inputs(q, tree)._replace(noise=noise, choices=choices)
    above = descend(top, tree.shards.border)
    part, below = _walk(q, tree, above.path, noise, choices, impl)
    path = above.path * tree.shards.subtree.blocks + below.path
    walked = path, above.log_prob + below.log_prob, above.entropy + below.entropy
    if budget is None:
        parts = [part, *_siblings(top, above)]
        return TreeAttention(merge_parts(parts).output.to(q.dtype), *walked, None, _selected(tree, path))
    if budget >= tree.plan.n:
        leaves = torch.arange(tree.plan.leaf_offset, tree.plan.nodes, device=path.device).expand(*path.shape, -1)
        return TreeAttention(read_leaves_sharded(q, tree), *walked, None, _real(tree, leaves))
    rows = open_budget(top, tree, path, budget)
    here = rows.masked_fill(rows >= tree.shards.crown, -1)
    return TreeAttention(read_visited(top, tree, rows, _read_crown(top, here)).output.to(q.dtype), *walked, None, rows)


def read_leaves_sharded(q: Queries, tree: ShardedTree) -> Queries:
    """`full_attention` over all processes: every query visits every subtree that has tokens of its context."""
    b, m, h, e = q.shape
    index = torch.arange(tree.shards.count, device=q.device)
    real = tree.shards.tokens_below(tree.shards.border, index, tree.lengths[:, None]) > 0
    pairs = real[:, None].expand(b, m, -1).flatten(0, 1).nonzero()
    visit = Visit(tree, pairs[:, 0], pairs[:, 1], m)
    visitors, part = visit.send(q), tree.part
    if not part.rows:
        output, lse = torch.split(nothing(part, visitors, h * e + h), [h * e, h], dim=1)
    else:
        leaves, packing = slice(part.plan.leaf_offset, None), Packing(visit.rows, part.rows)
        mask = None if part.mask is None else part.mask[:, leaves]
        found = attend_part(packing.pack(visitors), part.keys[:, leaves], part.values[:, leaves], mask)
        output, lse = packing.unpack(found.output), packing.unpack(found.lse)
    return visit.merged(Part(output.view(1, -1, h, e), lse[None]), None, b, m).output.to(q.dtype)


def crown_inputs(q: Queries, tree: ShardedTree) -> SearchInputs:
    """A search of the crown, in float32 at least."""
    crown, dtype = tree.crown, torch.promote_types(q.dtype, torch.float32)
    return SearchInputs(q.to(dtype), crown.keys, crown.values, tree.plan, crown.mask, log_count=crown.log_count)


def _walk(
    q: Queries, tree: ShardedTree, subtree: Int[Tensor, "b m"], noise: Decisions, choices: Decisions, impl: Impl
) -> tuple[Part, Descent]:
    """Search the subtree of every query where it lies: its part, and path, log_prob and entropy below the border."""
    b, m, h, e = q.shape
    query = torch.arange(b * m, device=q.device)
    visit = Visit(tree, query, subtree.flatten(), m)
    visitors = visit.send(q)
    with torch.no_grad():
        decisions = [None if d is None else visit.send(d[..., tree.shards.border :]) for d in (noise, choices)]
    answer, path = _search_part(tree, visitors, visit.rows, decisions, impl)
    answers = visit.route.back(answer).view(b, m, h * e + h + 2)
    output, lse, log_prob, entropy = torch.split(answers, [h * e, h, 1, 1], dim=2)
    path = visit.route.back(path).view(b, m)
    return Part(output.view(b, m, h, e), lse), Descent(path, log_prob[..., 0], entropy[..., 0], [], [])


def _search_part(
    tree: ShardedTree, visitors: Float[Tensor, "v h e"], rows: Int[Tensor, " v"], decisions: list[Decisions], impl: Impl
) -> tuple[Float[Tensor, "v c"], Int[Tensor, " v"]]:
    """Output, lse, log_prob and entropy of visitors side by side, and their paths."""
    part = tree.part
    if not part.rows:
        h, e = visitors.shape[1:]
        wide = visitors.to(torch.promote_types(visitors.dtype, torch.float32))
        return nothing(part, wide, h * e + h + 2), rows
    packing = Packing(rows, part.rows)
    noise, choices = (None if d is None else packing.pack(d) for d in decisions)
    q = packing.pack(visitors)
    inputs = SearchInputs(q, part.keys, part.values, part.plan, part.mask, noise, choices, part.log_count, part.counted)
    found = search(inputs, impl, lse=True)
    assert found.lse is not None
    numbers = (found.output.flatten(2), found.lse, found.log_prob[..., None], found.entropy[..., None])
    answer = torch.cat([number.to(found.lse.dtype) for number in numbers], dim=2)
    return packing.unpack(answer), packing.unpack(found.path)


def _siblings(top: SearchInputs, above: Descent) -> list[Part]:
    """Attention to the children of the crown that were not taken."""
    if not above.rows:
        return []
    rows = torch.cat(above.rows, dim=2)
    part = _read_crown(top, rows.masked_fill(torch.cat(above.scores, dim=2).isinf().all(dim=3), -1))
    return [] if part is None else [part]


def _read_crown(top: SearchInputs, rows: Int[Tensor, "b m s"]) -> Part | None:
    """Attention to rows of the crown, -1 is none; where a query has none its part weighs nothing. None: no crown."""
    if not top.keys.shape[1]:
        return None
    empty = (rows < 0).all(dim=2, keepdim=True)
    part = read_rows(top, rows.masked_fill(empty, 0))  # row 0 is real in every context
    return part._replace(lse=part.lse.masked_fill(empty, -torch.inf))


def _selected(tree: ShardedTree, path: Int[Tensor, "b m"]) -> Int[Tensor, "b m s"] | None:
    """Rows that a path reads; None where all nodes are real, so that they follow from the path."""
    return None if tree.crown.mask is None and tree.part.mask is None else _real(tree, selected_nodes(tree.plan, path))


def _real(tree: ShardedTree, rows: Int[Tensor, "b m s"]) -> Int[Tensor, "b m s"]:
    """The rows, with -1 in place of padding."""
    return rows.masked_fill(~tree.shards.real_rows(rows, tree.lengths[:, None, None]), -1)
