"""Reading budgets over several processes: nodes are opened level by level here, scored and read where they lie."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from retreever.ops.frontier.api import Part, read_rows
from retreever.ops.frontier.reference import Parents, Scored, child_rows, open_nodes, score_children
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import score_rows
from retreever.sharded.tree import ShardedTree
from retreever.sharded.visit import Visit, flat_inputs
from retreever.sharded.wire import Route
from retreever.tree.budget import Spread, slots, spread

Rows = Int[Tensor, "b m s"]


@torch.no_grad()
def open_budget(top: SearchInputs, tree: ShardedTree, path: Int[Tensor, "b m"], budget: int) -> Rows:
    """Rows of the whole tree that `budget` leaves to read, as on one process."""
    open_ = _spread(tree, budget)
    found = open_nodes(tree.plan, path, budget, open_, partial(_children, top, tree))
    if open_.own is None:
        return found
    token = torch.arange(found.shape[2], device=path.device)
    length = tree.lengths[:, None]
    leaves = tree.plan.leaf_offset + tree.shards.slots_of(token, length)
    every = leaves.masked_fill(token >= length, -1)[:, None]
    return torch.where((open_.own < 0)[:, None, None], every, found)


def read_visited(top: SearchInputs, tree: ShardedTree, rows: Rows, above: Part | None) -> Part:
    """Attention to `rows`: those below the border by visits to their subtrees, merged with the part read above."""
    b, m = rows.shape[:2]
    flat = rows.flatten(0, 1)
    query, column = (flat >= tree.shards.crown).nonzero(as_tuple=True)
    subtree, local = tree.shards.split_rows(flat[query, column])
    pairs, pair = torch.unique(query * tree.shards.count + subtree, return_inverse=True)
    visit = Visit(tree, pairs // tree.shards.count, pairs % tree.shards.count, m)
    visitors = visit.send(top.q)
    number = visit.route.back(torch.arange(len(visitors), device=rows.device))  # of each visitor where it is
    lists = Route(tree.wire, visit.to[pair])
    visitor, local = lists.send(torch.stack([number[pair], local], dim=1)).unbind(dim=1)
    index = visit.rows[visitor] * tree.part.plan.nodes + local
    found = read_rows(flat_inputs(tree.part, visitors), _by_visitor(index, visitor, len(visitors))[None])
    return visit.merged(found, above, b, m)


def _spread(tree: ShardedTree, budget: int) -> Spread:
    """How many nodes to open, from the lengths of the rows."""
    plan, lengths = tree.plan, tree.lengths
    open_ = spread(plan, budget, None)
    if tree.crown.mask is None and tree.part.mask is None:
        return open_
    powers = plan.branch ** torch.arange(1, plan.depth + 1, device=lengths.device)
    own = (powers < lengths[:, None]).sum(dim=1)
    covered = (lengths <= budget) & (tree.shards.blocks_of(lengths) <= slots(plan, budget))
    return open_._replace(own=own.masked_fill(covered, -1))


def _children(top: SearchInputs, tree: ShardedTree, parents: Parents, level: int, count: int) -> Scored:
    """`score_children` wherever they lie; leaves are not scored, since they are read in any case."""
    plan, shards = tree.plan, tree.shards
    if level <= shards.border:
        return score_children(top, parents, level, count)
    b, m, h, _ = top.q.shape
    rows, known = child_rows(plan, parents, level, count)
    real = known & shards.real_rows(torch.where(known, rows, plan.leaf_offset - 1), tree.lengths[:, None, None])
    scores = top.q.new_full((b * m * parents.shape[2], count, h), -torch.inf)
    if level <= plan.depth:
        asked = (parents < plan.nodes).flatten().nonzero()[:, 0]
        subtree, first = shards.split_rows(rows.view(-1, count)[asked, 0])
        visit = Visit(tree, asked // parents.shape[2], subtree, m, first)
        inputs = flat_inputs(tree.part, visit.send(top.q))
        index = visit.places[:, None] + torch.arange(count, device=rows.device)
        found = score_rows(inputs.q, inputs.keys, inputs.node_mask, index[None], inputs.log_count)[0]
        scores[asked] = visit.route.back(found)
    return rows, scores.view(*rows.shape, h).masked_fill(~real[..., None], -torch.inf), real


def _by_visitor(index: Int[Tensor, " n"], visitor: Int[Tensor, " n"], count: int) -> Int[Tensor, "v s"]:
    """The numbers of every visitor side by side, -1 where it has fewer than others."""
    counts = torch.bincount(visitor, minlength=count)
    order = visitor.argsort(stable=True)
    place = torch.arange(len(visitor), device=index.device) - (counts.cumsum(0) - counts)[visitor[order]]
    width = max(1, int(counts.max()) if count else 0)
    lists = index.new_full((count, width), -1)
    lists[visitor[order], place] = index[order]
    return lists
