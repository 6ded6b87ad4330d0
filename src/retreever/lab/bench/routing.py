"""Queries of many processes on their way to subtrees: how unevenly they arrive, and what copies of hot subtrees change.

A simulation in one process, with the plan and the routing of the library itself; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from retreever.lab.bench.report import Row, Rows
from retreever.sharded.plan import ShardPlan
from retreever.tree.plan import TreePlan


@dataclass(frozen=True)
class Load:
    """Queries that arrive at processes in one step, beside the mean."""

    busiest: float
    p99: float
    stay: float  # share of the queries that are answered where they are asked
    most_subtrees: int


def simulate(processes: int, queries: int, skews: tuple[float, ...], seed: int) -> Rows:
    """Rows of every skew, without copies, with the hottest subtrees everywhere, and with copies in proportion."""
    shards = ShardPlan.over(TreePlan(2**30), processes)
    rows: Rows = []
    for skew in skews:
        asked = _asked(shards.count, processes, queries, skew, seed)
        for copies, plan in _plans(shards, asked, processes):
            rows.append(_row(skew, copies, _load(plan, asked, processes)))
    return rows


def _asked(subtrees: int, processes: int, queries: int, skew: float, seed: int) -> Tensor:
    """Subtree of every query: the i-th hottest is asked for i^-skew times as often; 0 is uniform."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.arange(1, subtrees + 1, dtype=torch.float64) ** -skew
    hot = torch.randperm(subtrees, generator=generator)
    drawn = torch.multinomial(weight, processes * queries, replacement=True, generator=generator)
    return hot[drawn].view(processes, queries)


def _plans(shards: ShardPlan, asked: Tensor, processes: int) -> Iterator[tuple[str, ShardPlan]]:
    """The plan as it is, and two with copies of hot subtrees, found from the queries of the step."""
    yield "none", shards
    counts = torch.bincount(asked.flatten(), minlength=shards.count)
    hottest = counts.argsort(descending=True, stable=True).tolist()
    yield "hottest 8 everywhere", shards.with_copies(hottest[:8], list(range(processes)))
    mean, plan = float(counts.sum()) / processes, shards
    coldest = list(reversed(hottest))
    place = 0
    for subtree in hottest:
        wanted = round(float(counts[subtree]) / mean) - 1  # copies beside the first
        if wanted < 1:
            break
        holders = [coldest[(place + step) % processes] * processes // shards.count for step in range(wanted)]
        place += wanted
        plan = plan.with_copies([subtree], holders)
    yield "in proportion", plan


def _load(plan: ShardPlan, asked: Tensor, processes: int) -> Load:
    query = torch.arange(asked.shape[1])
    arrived, stay = torch.zeros(processes, dtype=torch.int64), 0
    for rank in range(processes):
        to = plan.holder_for(rank, asked[rank], query + rank)
        arrived += torch.bincount(to, minlength=processes)
        stay += int((to == rank).sum())
    share = arrived.double() / arrived.double().mean()
    held = torch.zeros(processes, dtype=torch.int64)
    for holders in plan.holders:
        held[list(holders)] += 1
    return Load(float(share.max()), float(share.quantile(0.99)), stay / asked.numel(), int(held.max()))


def _row(skew: float, copies: str, load: Load) -> Row:
    return {
        "part": "routing",
        "skew": skew,
        "copies": copies,
        "busiest": load.busiest,
        "p99": load.p99,
        "stay": load.stay,
        "most_subtrees": load.most_subtrees,
    }
