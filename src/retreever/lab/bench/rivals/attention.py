"""Rivals on attention that was trained without a tree: error, vectors read and scored, time of reading and building."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from retreever.errors import BackendError
from retreever.lab.bench.options_models import RivalsBench
from retreever.lab.bench.report import Row, Rows, Run
from retreever.lab.bench.rivals.clusters import Clusters
from retreever.lab.bench.rivals.fields import FieldNet, Fields, evaluation_field
from retreever.lab.bench.rivals.indexes import HNSW, IVF, Flat
from retreever.lab.bench.rivals.readers import (
    AllTokens,
    Blocks,
    Counts,
    RandomTokens,
    Reader,
    Reading,
    TopK,
    TreeOfMeans,
)
from retreever.lab.bench.timing import Call, synchronize, time_together
from retreever.tree.plan import TreePlan

TREE_KD, TREE_KEYS, ALL, ALL_HALF = "tree, k-d order", "tree, order of keys", "all tokens", "all tokens, bfloat16"
TOP, FLAT, IVF_, HNSW_ = "exact top-k", "exact top-k, FAISS", "IVF, FAISS", "HNSW, FAISS"
BLOCKS, CLUSTERS, RANDOM = "best blocks", "flat clusters", "random k"
TRAINED = "as trained"
KINDS = {TRAINED: 1.0, "soft": 0.25, "peaked": 3.0}  # factor on all scores


@dataclass
class Found:
    """Sums over all fields of one method with one budget."""

    method: str
    budget: int
    errors: dict[str, Tensor] = field(default_factory=dict)  # kind -> squared error and square of the full output
    truth: float = 0.0
    counts: list[Counts] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, reading: Reading, full: Tensor) -> None:
        """Add the error of one reading."""
        pair = torch.stack([(reading.output - full).square().sum(), full.square().sum()]).double()
        self.errors[kind] = self.errors.get(kind, 0) + pair

    def to_row(self, n: int, full_truth: float) -> Row:
        """The row of JSON."""
        errors = {f"error, {kind}": _digits(float((a / b).sqrt())) for kind, (a, b) in self.errors.items()}
        read, scored = (sum(column) / len(self.counts) for column in zip(*self.counts, strict=True))
        ratio = {"rmse_ratio": _digits((self.truth / full_truth) ** 0.5)}
        build = {"build_us": _digits(1e6 * median(self.build))} if self.build else {}
        where = {"part": "fields", "n": n, "method": self.method, "budget": self.budget}
        return {**where, "read": _digits(read), "scored": _digits(scored), **errors, **ratio, **self.timing, **build}


def make_readers(device: torch.device, left_out: dict[str, str]) -> dict[str, Reader]:
    """All methods that can run on `device`, by name; the others are named in `left_out`."""
    readers: dict[str, Reader] = {TREE_KD: TreeOfMeans("kd"), TREE_KEYS: TreeOfMeans("keys"), TOP: TopK()}
    try:
        if device.type != "cpu":
            raise BackendError("faiss: expected a CPU, where its indexes are compared")
        readers |= {FLAT: Flat(), IVF_: IVF(), HNSW_: HNSW()}
    except BackendError as error:
        if "FAISS" not in left_out:
            print(f"FAISS left out: {error}", file=sys.stderr)
        left_out["FAISS"] = str(error)
    readers |= {BLOCKS: Blocks("kd"), CLUSTERS: Clusters(), RANDOM: RandomTokens(), ALL: AllTokens()}
    return readers | ({ALL_HALF: AllTokens(torch.bfloat16)} if device.type == "cuda" else {})


def field_rows(run: Run, options: RivalsBench, net: FieldNet, n: int, left_out: dict[str, str]) -> tuple[Rows, Row]:
    """Rows of all methods and budgets over fields of `n` points, and what is known of the attention over all tokens."""
    readers = make_readers(run.device, left_out)
    path = TreePlan(n, 2).tokens
    budgets = sorted({path, *(budget for budget in options.budgets if path < budget < n)})
    table = {(name, b): Found(name, b) for name, reader in readers.items() for b in budgets if reader.least <= b}
    about: Row = {"n": n, "path": path, "rmse": 0.0, "effective_tokens": dict.fromkeys(KINDS, 0.0)}
    for number in range(options.fields):
        drawn = evaluation_field(number, n, options.queries, run.device)
        _read_field(run, net, drawn, readers, budgets, table, timed=number == options.fields - 1)
        _describe(net, drawn, about, options.fields)
        print(f"fields, n={n:,}: {number + 1} of {options.fields}", file=sys.stderr, flush=True)
    truth = table[ALL, path].truth
    about["rmse"] = _digits((truth / (options.fields * options.queries)) ** 0.5)
    return [found.to_row(n, truth) for found in table.values()], about


def _read_field(
    run: Run,
    net: FieldNet,
    drawn: Fields,
    readers: dict[str, Reader],
    budgets: Sequence[int],
    table: dict[tuple[str, int], Found],
    timed: bool,
) -> None:
    """Read one field by all methods with all budgets; `timed` also takes the time of a call."""
    q, keys, values = net.projected(drawn)
    everything = AllTokens()
    everything.prepare(keys, values, None, 0)
    full = {kind: everything.read(factor * q, 0).output for kind, factor in KINDS.items()}
    prepared: set[str] = set()
    for budget in budgets:
        here = {name: reader for name, reader in readers.items() if (name, budget) in table}
        for name, reader in here.items():
            found = table[name, budget]
            if reader.per_budget or name not in prepared:
                prepared.add(name)
                found.build.append(_seconds(run, partial(reader.prepare, keys, values, drawn.xc[0], budget)))
            for kind, factor in KINDS.items():
                reading = reader.read(factor * q, budget)
                found.add(kind, reading, full[kind])
                if kind == TRAINED:
                    found.truth += float((net.finish(reading.output) - drawn.yt[0]).square().sum())
                    found.counts.append(reading.counts())
        if timed:
            calls: dict[str, Sequence[Call]] = {name: [partial(r.read, q, budget)] for name, r in here.items()}
            for name, timing in time_together(calls, run.device, "eager", run.limits).items():
                table[name, budget].timing = timing.to_json()


def _describe(net: FieldNet, drawn: Fields, about: Row, fields: int) -> None:
    """Add how many tokens share the weight: the exponential of the entropy, averaged over queries, heads and fields."""
    q, keys, _ = net.projected(drawn)
    for kind, factor in KINDS.items():
        found = []
        for head in range(q.shape[1]):
            logs = (factor * q[:, head] @ keys[:, head].T * q.shape[-1] ** -0.5).log_softmax(dim=-1)
            found.append(-(logs.exp() * logs).sum(dim=-1))
        about["effective_tokens"][kind] += float(torch.stack(found).exp().mean()) / fields


def _seconds(run: Run, call: Call) -> float:
    synchronize(run.device)
    started = perf_counter()
    call()
    synchronize(run.device)
    return perf_counter() - started


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def methods_in(rows: Iterable[Row]) -> list[str]:
    """Names of the methods, in the order of the rows."""
    return list(dict.fromkeys(row["method"] for row in rows))
