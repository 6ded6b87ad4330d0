"""Flat clusters with counts: what a tree is without its levels."""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from retreever.lab.bench.rivals.readers import (
    ByHead,
    Counts,
    Index,
    Queries,
    Reader,
    Reading,
    Tokens,
    by_head,
    filled,
    scaled,
    score,
    weighted,
)

ROUNDS = 10  # of k-means


class Clusters(Reader):
    """Flat k-means clusters of the keys of every head; those not opened are read as means, times their size."""

    per_budget = True

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """As many opened as the budget allows, with as many means; if not one can be opened, all goes to means."""
        self.keys, self.values = by_head(keys), by_head(values)
        n = len(keys)
        self.opened = min(n, budget * budget // (4 * n))  # count + opened * (n / count - 1) = budget has a solution
        both = budget + self.opened
        count = min(n, (both + math.isqrt(both * both - 4 * self.opened * n)) // 2)
        owner = k_means(self.keys, count)
        self.sizes = sizes_of(owner, count)
        self.mean_keys, self.mean_values = (means_of(part, owner, self.sizes) for part in (self.keys, self.values))
        self.members = owner.argsort(dim=1, stable=True)
        self.starts = self.sizes.cumsum(dim=1) - self.sizes
        self.largest = int(self.sizes.max())

    def read(self, q: Queries, budget: int) -> Reading:
        """Tokens of the best clusters, means of all others."""
        heads, m = scaled(q), len(q)
        scores = heads @ self.mean_keys.mT + self.sizes.log()[:, None]
        best = scores.topk(self.opened, dim=-1).indices  # (h, m, opened)
        rank = torch.arange(self.largest, device=q.device)
        sizes, starts = (part[:, None].expand(-1, m, -1).gather(2, best) for part in (self.sizes, self.starts))
        place = (starts[..., None] + rank).flatten(2).clamp_max(self.keys.shape[1] - 1)
        index = self.members[:, None].expand(-1, m, -1).gather(2, place)
        index = index.masked_fill((rank >= sizes[..., None]).flatten(2), -1)
        left = scores.scatter(2, best, -torch.inf)
        weights = torch.cat([left, score(heads, self.keys, index)], dim=-1).softmax(dim=-1)
        means, tokens = torch.split(weights, [scores.shape[2], index.shape[2]], dim=-1)
        output = means @ self.mean_values + weighted(tokens, self.values, index)
        return Reading(output.transpose(0, 1), lambda: self._count(left, index))

    def _count(self, left: Tensor, index: Index) -> Counts:
        means = float((left > -torch.inf).sum(dim=-1).double().mean())
        return Counts(means + filled(index), left.shape[2] + filled(index))


def k_means(keys: ByHead, count: int) -> Int[Tensor, "h n"]:
    """The cluster of every key of every head, after a few rounds from random keys."""
    generator = torch.Generator(keys.device).manual_seed(0)
    centres = keys[:, torch.randperm(keys.shape[1], generator=generator, device=keys.device)[:count]]
    for _ in range(ROUNDS):
        owner = _nearest(keys, centres)
        sizes = sizes_of(owner, count)
        centres = torch.where(sizes[..., None] > 0, means_of(keys, owner, sizes), centres)
    return _nearest(keys, centres)


def sizes_of(owner: Int[Tensor, "h n"], count: int) -> Int[Tensor, "h c"]:
    """How many keys every cluster has."""
    return owner.new_zeros(len(owner), count).scatter_add(1, owner, torch.ones_like(owner))


def means_of(part: ByHead, owner: Int[Tensor, "h n"], sizes: Int[Tensor, "h c"]) -> ByHead:
    """Means of the rows that belong to every cluster."""
    sums = part.new_zeros(*sizes.shape, part.shape[2])
    sums = sums.scatter_add(1, owner[..., None].expand_as(part), part)
    return sums / sizes.clamp_min(1)[..., None]


def _nearest(keys: ByHead, centres: ByHead) -> Int[Tensor, "h n"]:
    return (keys @ centres.mT - centres.square().sum(dim=2)[:, None] / 2).argmax(dim=2)
