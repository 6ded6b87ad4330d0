"""Detours: random decisions during training, so that the search can unlearn wrong choices it is certain of.

REINFORCE learns from the paths the policy samples, and the gradient of a head is proportional to p (1 - p). Where all
heads are certain of a wrong child (p = 1 - 1e-16, say), no better path is ever sampled; where three of four are, better
paths are sampled but the gradients vanish. So a share of the queries makes one decision at random while training. Where
the prediction is then as good as from all leaves, a cross-entropy term trains every head to take that child. The term
is weighted by how well the search already works, since at chance level random decisions teach nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.tree.selected import path_nodes
from retreever.tree.value import Tree

PerQuery = Float[Tensor, "b m"]
Choices = Int[Tensor, "b m depth"]


class Detours(NamedTuple):
    """Detours of a batch, for every query."""

    taken: Bool[Tensor, "b m"]  # True where the query made one
    log_prob: PerQuery  # of the child taken at random, mean over heads
    weight: PerQuery | float  # 0 to 1, of the term in the loss


def draw_detours(
    b: int, m: int, depth: int, branch: int, share: float, generator: torch.Generator, device: torch.device
) -> Choices:
    """Choices that send a `share` of the queries to a random child at one random decision; -1 elsewhere."""
    draws = torch.rand(b, m, 3, generator=generator, device=generator.device).to(device)
    sent, level, child = draws.unsqueeze(2).unbind(3)
    chosen = (sent < share) & (torch.arange(depth, device=device) == (level * depth).floor())
    return torch.where(chosen, (child * branch).floor(), -1).to(torch.int64)


def find_detours(
    q: Float[Tensor, "b m h e"], tree: Tree, path: Int[Tensor, "b m"], choices: Choices, weight: PerQuery | float
) -> Detours | None:
    """The detours in `choices` that led to `path`, with the log-probability of the child taken; None without decisions.

    Reads the children of one decision per query: O(1) beside the O(log n) of the search.
    """
    if not tree.plan.depth:
        return None
    level = (choices >= 0).to(torch.int8).argmax(dim=2, keepdim=True)  # (b, m, 1)
    node = path_nodes(tree.plan, path).gather(2, level)
    child = node % tree.plan.branch  # every level begins at a multiple of the branch
    taken = (choices.gather(2, level) == child)[..., 0]  # a choice of padding is not taken
    rows = node - child + torch.arange(tree.plan.branch, device=path.device)  # (b, m, k): the child and its siblings
    real = None
    if tree.mask is not None:
        real = tree.mask.gather(1, rows.flatten(1)).view_as(rows)
        rows = torch.where(real, rows, node)  # padding may hold NaN
        taken = taken & (real.sum(dim=2) > 1)  # with a single child there is no decision
    index = child[..., None].expand(-1, -1, -1, q.shape[2])
    log_prob = _head_log_probs(q, tree.keys, rows, real).gather(2, index)
    return Detours(taken, log_prob.mean(dim=(2, 3)), weight)


def _head_log_probs(
    q: Tensor, keys: Float[Tensor, "b t h e"], rows: Int[Tensor, "b m k"], real: Bool[Tensor, "b m k"] | None
) -> Float[Tensor, "b m k h"]:
    """Log of the attention weights of every head among the nodes in `rows`; -inf where a node is not real."""
    heads, width = q.shape[2:]
    children = keys.gather(1, rows.flatten(1)[..., None, None].expand(-1, -1, heads, width))
    scores = (q[:, :, None] * children.view(*rows.shape, heads, width)).sum(dim=-1) * width**-0.5
    if real is not None:
        scores = scores.masked_fill(~real[..., None], -torch.inf)
    return scores.log_softmax(dim=2)


def detour_credit(reward: PerQuery, full_reward: PerQuery) -> PerQuery:
    """Weight of a detour: 1 where its reward is at least that of all leaves, else less by the difference, at least 0.

    Never negative: the policy did not choose the detour, and pushing its probability down would have no limit.
    """
    return (1 + reward - full_reward).clamp(0, 1)
