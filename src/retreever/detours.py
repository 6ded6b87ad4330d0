"""Detours: a way out of wrong turns that the search is certain of.

REINFORCE learns from what the policy does, and moves a head by p (1 - p). Where all heads are certain of a wrong turn,
say of 1 - 1e-16, it never sees better; where three of four are, it sees better, but no head moves. So a share of the
queries makes one decision at random while training. Where that reads as well as all leaves do, every head for itself is
told that this was the child to take, as far as the search already works: at chance, random turns teach chance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.tree.build import Tree
from retreever.tree.selected import path_nodes

PerQuery = Float[Tensor, "b m"]
Choices = Int[Tensor, "b m depth"]


class Detours(NamedTuple):
    """What came of them, for every query."""

    taken: Bool[Tensor, "b m"]  # queries that were sent on one
    log_prob: PerQuery  # of the child taken there, mean over heads
    weight: PerQuery | float  # 0 to 1: how far they are to count yet


def draw_detours(
    b: int, m: int, depth: int, branch: int, share: float, generator: torch.Generator, device: torch.device
) -> Choices:
    """Choices that send a `share` of the queries to a random child at one decision, all equally likely; else -1."""
    draws = torch.rand(b, m, 3, generator=generator, device=generator.device).to(device)
    sent, level, child = draws.unsqueeze(2).unbind(3)
    here = (sent < share) & (torch.arange(depth, device=device) == (level * depth).floor())
    return torch.where(here, (child * branch).floor(), -1).to(torch.int64)


def find_detours(
    q: Float[Tensor, "b m h e"], tree: Tree, path: Int[Tensor, "b m"], choices: Choices, weight: PerQuery | float
) -> Detours | None:
    """The detours in `choices` that led to `path`, and what each head gives the child taken. None without decisions.

    Reads the children of one decision per query: O(1) beside the O(log n) of the search.
    """
    if not tree.plan.depth:
        return None
    level = (choices >= 0).to(torch.int8).argmax(dim=2, keepdim=True)  # (b, m, 1)
    node = path_nodes(tree.plan, path).gather(2, level)
    child = node % tree.plan.branch  # every level begins at a multiple of it
    taken = (choices.gather(2, level) == child)[..., 0]  # a choice of padding is not taken
    rows = node - child + torch.arange(tree.plan.branch, device=path.device)  # (b, m, k): it and its siblings
    real = None
    if tree.mask is not None:
        real = tree.mask.gather(1, rows.flatten(1)).view_as(rows)
        rows = torch.where(real, rows, node)  # what padding holds, say NaN, is never read
        taken = taken & (real.sum(dim=2) > 1)  # with one child there was nothing to decide
    index = child[..., None].expand(-1, -1, -1, q.shape[2])
    log_prob = _head_log_probs(q, tree.keys, rows, real).gather(2, index)
    return Detours(taken, log_prob.mean(dim=(2, 3)), weight)


def _head_log_probs(
    q: Tensor, keys: Float[Tensor, "b t h e"], rows: Int[Tensor, "b m k"], real: Bool[Tensor, "b m k"] | None
) -> Float[Tensor, "b m k h"]:
    """Log of the attention weight of every head among the nodes in `rows`; what is not real has none."""
    heads, width = q.shape[2:]
    children = keys.gather(1, rows.flatten(1)[..., None, None].expand(-1, -1, heads, width))
    scores = (q[:, :, None] * children.view(*rows.shape, heads, width)).sum(dim=-1) * width**-0.5
    if real is not None:
        scores = scores.masked_fill(~real[..., None], -torch.inf)
    return scores.log_softmax(dim=2)


def detour_credit(reward: PerQuery, full_reward: PerQuery) -> PerQuery:
    """How far a detour is imitated: 1 where it reads as well as all leaves do, less by what it reads worse, never < 0.

    Not less, since what a detour does wrong is not the policy's doing: pushing it down would have no end.
    """
    return (1 + reward - full_reward).clamp(0, 1)
