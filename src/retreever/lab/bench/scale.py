"""What a tree over many processes costs: a model fitted to measured runs, and a simulation of its routing.

    time of a call = messages * a + bytes * b + nodes scored * c + d

`a` to `d` are fitted, none negative, to the rows of `bench sharded` with 1, 2 and 4 processes. The search on a GPU is
fitted to `bench attention`: a constant and a time per level.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from retreever.errors import DataError
from retreever.lab.bench.options import ScaleBench
from retreever.lab.bench.report import Row, Rows, Run, quantity
from retreever.lab.bench.routing import simulate
from retreever.lab.tables import Table, percent
from retreever.sharded.plan import ShardPlan
from retreever.tree.plan import TreePlan

SIZES = ((10**9, 64), (10**9, 1024), (10**12, 1024), (10**12, 65_536))
NETWORK = (20e-6, 1 / 10e9)  # seconds per message and per byte that the paper cases assume beside a GPU
PATH_MESSAGES = 5  # counts, places, queries; answers, paths


@dataclass(frozen=True)
class Costs:
    """Seconds per message, byte and node scored, and per call."""

    message: float
    byte: float
    node: float
    call: float
    error: float = 0.0  # median relative error of the fit

    def seconds(self, messages: float, sent: float, nodes: float) -> float:
        """Time of a call of one process."""
        return messages * self.message + sent * self.byte + nodes * self.node + self.call


def measure(options: ScaleBench) -> None:
    """Fit, compute, simulate; write the files."""
    run = Run.start("scale", options)
    measured = [row for processes in (1, 2, 4) for row in _measured(options.results, processes)]
    costs, gpu = fit(measured), fit_search(_load(options.results / "attention-cuda.json")["rows"])
    predicted = [predict(n, processes, options.dim, options.heads, costs, gpu) for n, processes in SIZES]
    routed = simulate(options.processes, options.queries, options.skews, options.seed)
    tables = _fit_table(costs, gpu, measured), _paper_table(predicted), _routing_table(options, routed)
    run.publish([*predicted, *routed], tables, None, {"costs": vars(costs), "gpu_search_us": list(gpu)})


def fit(rows: Rows) -> Costs:
    """Least squares without negative costs: the best of all subsets of the four terms."""
    terms = torch.tensor([_terms(row) for row in rows], dtype=torch.float64)
    wanted = torch.tensor([row["us"] * 1e-6 for row in rows], dtype=torch.float64)
    best, found = torch.inf, torch.zeros(4, dtype=torch.float64)
    for count in range(1, 5):
        for chosen in combinations(range(4), count):
            weighted = terms[:, list(chosen)] / wanted[:, None]  # relative errors: short calls count as much as long
            solved = torch.linalg.lstsq(weighted, torch.ones_like(wanted)[:, None]).solution[:, 0]
            left = float((weighted @ solved - 1).square().sum())
            if bool((solved >= 0).all()) and left < best:
                best, found = left, torch.zeros(4, dtype=torch.float64).index_copy(0, torch.tensor(chosen), solved)
    error = float(((terms @ found) / wanted - 1).abs().median())
    message, byte, node, call = found.tolist()
    return Costs(message, byte, node, call, error)


def _terms(row: Row) -> tuple[float, float, float, float]:
    alone = row["processes"] == 1
    nodes = row["m"] * 2 * (row["depth"] if row["budget"] is None else row["budget"])
    return 0.0 if alone else row["messages"], row["m"] * row["bytes_per_query"], nodes, 1.0


def fit_search(rows: Rows) -> tuple[float, float]:
    """Microseconds of a search of 256 queries on the GPU: at depth 0, and per level."""
    found = [row for row in rows if row.get("part") == "operator" and row["method"] == "tree" and row["m"] == 256]
    depth = torch.tensor([[1.0, TreePlan(row["n"]).depth] for row in found], dtype=torch.float64)
    times = torch.tensor([[row["us"]] for row in found], dtype=torch.float64)
    start, level = torch.linalg.lstsq(depth, times).solution[:, 0].tolist()
    return start, level


def predict(n: int, processes: int, dim: int, heads: int, costs: Costs, gpu: tuple[float, float]) -> Row:
    """What a tree of `n` tokens costs each of `processes`: memory, and per query bytes and time."""
    shards = ShardPlan.over(TreePlan(n), processes)
    row = 2 * 2 * dim  # bytes of a key and a value in bfloat16
    held = -(-shards.count // processes)
    sent = (2 * dim + heads + 2) * 4 + 16 + 8  # query, output, lse, log_prob, entropy; context, subtree, path
    away = 1 - 1 / processes
    depth = shards.tree.depth
    here = costs.seconds(PATH_MESSAGES, 256 * away * sent, 256 * 2 * depth)
    network = PATH_MESSAGES * NETWORK[0] + 256 * away * sent * NETWORK[1]
    return {
        "part": "paper",
        "n": n,
        "processes": processes,
        "depth": depth,
        "crown_bytes": shards.crown * row,
        "part_bytes": held * shards.subtree.nodes * row,
        "bytes_per_query": away * sent,
        "ms_like_measured": 1e3 * here,
        "ms_gpu": 1e3 * network + (gpu[0] + gpu[1] * depth) / 1e3,
        "append_aggregations": depth,
        "append_bytes": 4 * dim * (1 + (processes - 1)),  # the token to its holder, the new root to all
    }


def _measured(folder: Path, processes: int) -> Rows:
    rows = _load(folder / f"sharded-{processes}-cpu.json")["rows"]
    return [{**row, "processes": processes} for row in rows if row["part"] == "answer"]


def _load(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"results: expected {file}, as a benchmark writes it, got {error}") from None
    return found


def _fit_table(costs: Costs, gpu: tuple[float, float], rows: Rows) -> Table:
    lines = (
        ("per message", f"{1e6 * costs.message:.1f} µs"),
        ("per KiB sent", f"{1e6 * 1024 * costs.byte:.2f} µs"),
        ("per node scored", f"{1e9 * costs.node:.0f} ns"),
        ("per call", f"{1e6 * costs.call:.0f} µs"),
        ("median error of the fit", percent(costs.error)),
        ("GPU, 256 queries: start", f"{gpu[0]:.2f} µs"),
        ("GPU, 256 queries: per level", f"{gpu[1]:.2f} µs"),
    )
    return Table(f"Costs fitted to {len(rows)} rows of bench sharded, 1, 2 and 4 processes", ("what", "cost"), lines)


def _paper_table(rows: Rows) -> Table:
    lines = tuple(
        (
            f"{row['n']:.0e}".replace("e+", "e"),
            f"{row['processes']:,}",
            str(row["depth"]),
            quantity(row["crown_bytes"] / 2**20),
            quantity(row["part_bytes"] / 2**30),
            quantity(row["bytes_per_query"]),
            quantity(row["ms_like_measured"]),
            quantity(row["ms_gpu"]),
            str(row["append_aggregations"]),
            quantity(row["append_bytes"] / 1024),
        )
        for row in rows
    )
    columns = (
        "tokens", "processes", "depth", "crown, MiB", "part, GiB", "bytes per query", "ms, like measured",
        "ms, GPUs", "append: aggregations", "append: KiB sent",
    )  # fmt: skip
    notes = (
        "MiB, GiB: keys and values of width 64 in bfloat16, per process; ms: one call of 256 queries per process",
        f"GPUs: the fitted search, and a network of {1e6 * NETWORK[0]:.0f} µs per message and 10 GB/s, assumed",
        "append: on paper, for one token; appending to a tree over several processes is not built",
    )
    return Table("On paper: what the model says", columns, lines, notes)


def _routing_table(options: ScaleBench, rows: Rows) -> Table:
    lines = tuple(
        (
            "uniform" if row["skew"] == 0 else f"Zipf {row['skew']:g}",
            row["copies"],
            f"{row['busiest']:.2f}x",
            f"{row['p99']:.2f}x",
            percent(row["stay"]),
            str(row["most_subtrees"]),
        )
        for row in rows
    )
    title = f"Simulated routing: {options.processes:,} processes, {options.queries} queries each, seed {options.seed}"
    columns = ("queries", "copies", "busiest process", "99th of 100", "answered at home", "subtrees held, most")
    notes = ("busiest process: queries that arrive there, beside the mean of all processes",)
    return Table(title, columns, lines, notes)
