"""The frontier of a budgeted search in plain torch: every other backend is tested against it. Any dtype, any device.

The tree is opened level by level. Of the children of the nodes opened above, a level opens the one on the path and then
those with the largest share of the attention among them all, as many as its width allows (tree/budget.py). Heads are
averaged over the fourth roots of their shares: a node that several heads look at a little comes before one that a
single head looks at much, whose tokens that head mostly has read already. (Of powers from 1 to 1/8 and the mean of
logarithms, 1/4 lost least on fields kept for choosing, benchmarks/rivals.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import count_up, score_rows
from retreever.tree.budget import Spread, slots
from retreever.tree.plan import TreePlan
from retreever.tree.selected import leaf_nodes, path_nodes

Rows = Int[Tensor, "b m s"]
Parents = Int[Tensor, "b m p"]
Scored = tuple[Rows, Float[Tensor, "b m s h"], Bool[Tensor, "b m s"]]
Children = Callable[[Parents, int, int], Scored]  # of opened nodes: (their rows, level, children each)


def frontier_reference(inputs: SearchInputs, path: Int[Tensor, "b m"], budget: int, open_: Spread) -> Rows:
    """Rows of the nodes that at most `budget` tokens leave to read, ascending, -1 where there are fewer."""
    plan = inputs.plan
    inputs = inputs._replace(q=inputs.q.to(torch.promote_types(inputs.q.dtype, torch.float32)))
    found = open_nodes(plan, path, budget, open_, partial(score_children, inputs))
    if open_.own is None:
        return found
    leaves = leaf_nodes(plan, path, inputs.node_mask)
    every = _packed(leaves.masked_fill(leaves < 0, plan.nodes), found.shape[2], plan)
    return torch.where((open_.own < 0)[:, None, None], every, found)


def open_nodes(plan: TreePlan, path: Int[Tensor, "b m"], budget: int, open_: Spread, children: Children) -> Rows:
    """Rows left to read when every level opens as many nodes as `open_` says; `children` scores those of opened nodes.

    Wherever the nodes are: `children` may read this tree, or ask other processes.
    """
    taken = path_nodes(plan, path)
    opened = torch.full_like(path, -1)[..., None]  # the root; plan.nodes is no node
    left = []
    for level, most in enumerate(open_.widest, start=1):
        rows, scores, real = children(opened, level, plan.branch)
        roots = (0.25 * scores.log_softmax(dim=2)).exp()  # of logarithms: most shares are too small for float32
        share = roots.mean(dim=3).masked_fill(~real, -torch.inf)
        share = share.masked_fill(rows == taken[..., level - 1, None], torch.inf)
        opens = _first(share, _width(open_, level, rows)) & real
        left.append(rows.masked_fill(opens | ~real, plan.nodes))
        opened = rows.masked_fill(~opens, plan.nodes).sort(dim=2).values[..., :most]
    rows, _, real = children(opened, plan.depth + 1, plan.block)
    left.append(rows.masked_fill(~real, plan.nodes))
    return _packed(torch.cat(left, dim=2), slots(plan, budget), plan)


def score_children(inputs: SearchInputs, parents: Parents, level: int, count: int) -> Scored:
    """Rows and scores of the children of nodes, `count` each on `level`, and which are real; others score -inf."""
    mask = inputs.node_mask
    rows, real = child_rows(inputs.plan, parents, level, count)
    at = torch.where(real, rows, 0)
    if mask is not None:
        real = real & mask.gather(1, at.flatten(1)).view_as(at)
    scores = score_rows(inputs.q, inputs.keys, mask, at, inputs.log_count)
    return rows, scores.masked_fill(~real[..., None], -torch.inf), real


def child_rows(plan: TreePlan, parents: Parents, level: int, count: int) -> tuple[Rows, Bool[Tensor, "b m s"]]:
    """Rows of the children of nodes, `count` each on `level`, and whether their parent is a node."""
    above = plan.offsets[level - 1] if level > 1 else -1  # the root's row
    rows = (plan.offsets[level] + (parents - above)[..., None] * count + count_up(count, parents)).flatten(2)
    return rows, (parents < plan.nodes).repeat_interleave(count, dim=2)


def _width(open_: Spread, level: int, like: Tensor) -> Int[Tensor, "b 1 1"] | int:
    if open_.own is None:
        return open_.table[-1][level - 1]
    if open_.chosen is not None:
        column = open_.chosen[:, level - 1]
    else:
        column = torch.tensor([row[level - 1] for row in open_.table], device=like.device)
    return column[open_.own.clamp_min(0)][:, None, None]


def _first(share: Float[Tensor, "b m s"], width: Tensor | int) -> Bool[Tensor, "b m s"]:
    """Whether a node is among the `width` of largest share; of equals the earlier ones are."""
    rank = share.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    return rank < width


def _packed(rows: Rows, count: int, plan: TreePlan) -> Rows:
    """The first `count` rows, ascending; -1 in place of plan.nodes, which is no node."""
    found = rows.sort(dim=2).values[..., :count]
    found = F.pad(found, (0, count - found.shape[2]), value=plan.nodes)
    return found.masked_fill(found == plan.nodes, -1)
