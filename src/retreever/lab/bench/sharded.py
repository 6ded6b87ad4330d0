"""A tree over several processes, started by torchrun: equal to one process, how fast, and what travels.

    torchrun --nproc-per-node 4 -m retreever bench sharded

Every process times the same calls; the slowest counts. Without torchrun one process is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from retreever.attention import TreeCrossAttention
from retreever.lab.bench.machine import describe
from retreever.lab.bench.memory import size_of
from retreever.lab.bench.options import ShardedBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, quantity
from retreever.lab.bench.timing import synchronize
from retreever.lab.tables import Table
from retreever.results import TreeCrossAttentionResult
from retreever.sharded.tree import ShardedTree
from retreever.train.distributed import Ranks, ranks_of_job
from retreever.tree.value import Tree


def measure(options: ShardedBench) -> None:
    """Run the benchmark on all processes; the first writes its files."""
    options = replace(options, n=check_sizes("n", options.n), m=check_sizes("m", options.m))
    if options.quick:
        options = replace(options, n=tuple(n for n in options.n if n <= 1 << 14) or options.n[:1])
    with _job(options.device) as (ranks, device):
        run = Run.start(f"sharded-{ranks.world}", replace(options, device=device))
        mesh = init_device_mesh(run.device.type, (ranks.world,))
        with torch.inference_mode():
            rows = [row for n in options.n for row in _rows(run, options, ranks, mesh, n)]
        if ranks.first:
            run.publish(rows, [_table(run, options, ranks, rows)], None, {"processes": ranks.world})


@contextmanager
def _job(device: str) -> Iterator[tuple[Ranks, str]]:
    """The processes that torchrun started, or this one alone in a group of its own."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if "WORLD_SIZE" not in os.environ:
        kind = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1)
        try:
            yield Ranks(), device
        finally:
            dist.destroy_process_group()
        return
    with ranks_of_job(device) as job:
        yield job


def _rows(run: Run, options: ShardedBench, ranks: Ranks, mesh: DeviceMesh, n: int) -> Rows:
    """Rows of one context size: building, and answers to each number of queries with one path and a budget."""
    module = TreeCrossAttention(options.dim, options.heads, aggregator="mean").to(run.device, run.dtype).eval()
    own = slice(n * ranks.rank // ranks.world, n * (ranks.rank + 1) // ranks.world)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, n, options.dim, generator=generator).to(run.device, run.dtype)
    build = partial(module.build_sharded, whole[:, own], mesh)
    tree = build()
    stored = {"crown": _stored(tree.crown), "part": ranks.largest([_stored(tree.part)], run.device)[0]}
    seconds = _seconds(run, ranks, build, 3)
    rows: Rows = [{"n": n, "part": "build", "us": 1e6 * seconds, "depth": tree.plan.depth, "stored_bytes": stored}]
    for m in options.m:
        queries = torch.randn(ranks.world, 1, m, options.dim, generator=generator).to(run.device, run.dtype)
        query = queries[ranks.rank]
        for budget in (None, options.budget):
            row = _answer(run, ranks, module, tree, query, budget)
            if n <= options.check:
                alone = module(query, module.build(whole), budget=budget)
                row["error"], row["other_paths"] = _difference(ranks, module, tree, query, budget, alone, run.device)
            rows.append({"n": n, "part": "answer", **row})
    return rows


def _answer(
    run: Run, ranks: Ranks, module: TreeCrossAttention, tree: ShardedTree, query: Tensor, budget: int | None
) -> Row:
    """Time of a call, bytes sent per query by all processes together, messages of a call."""
    call = partial(module, query, tree, budget=budget)
    call()
    sent, messages = tree.wire.sent, tree.wire.messages
    call()
    sent, messages = tree.wire.sent - sent, tree.wire.messages - messages
    total = ranks.world * ranks.mean(float(sent), run.device)
    return {
        "m": query.shape[1],
        "budget": budget,
        "us": 1e6 * _seconds(run, ranks, call, run.limits.samples),
        "messages": messages,
        "bytes_per_query": total / (ranks.world * query.shape[1]),
        "depth": tree.plan.depth,
    }


def _seconds(run: Run, ranks: Ranks, call: Callable[[], object], samples: int) -> float:
    """Time of the fastest call that all processes make together, on the slowest of them."""
    taken: list[float] = []
    started = perf_counter()
    enough = False
    while not enough:
        ranks.wait()
        start = perf_counter()
        call()
        synchronize(run.device)
        taken.append(perf_counter() - start)
        late = perf_counter() - started > run.limits.seconds and len(taken) >= 3
        enough = ranks.from_first(float(late or len(taken) >= samples), run.device) > 0  # all stop together
    return ranks.largest([min(taken)], run.device)[0]


def _difference(
    ranks: Ranks,
    module: TreeCrossAttention,
    tree: ShardedTree,
    query: Tensor,
    budget: int | None,
    alone: TreeCrossAttentionResult,
    device: torch.device,
) -> tuple[float, int]:
    """Largest difference to one process, and number of queries with another path, over all processes."""
    found = module(query, tree, budget=budget)
    other = alone.path != found.path
    error = (found.output - alone.output).abs().amax(dim=2).masked_fill(other, 0)
    largest = ranks.largest([float(error.max())], device)[0]
    return largest, round(ranks.world * ranks.mean(float(other.sum()), device))


def _stored(tree: Tree) -> float:
    return float(size_of(tree.keys, tree.values))


def _table(run: Run, options: ShardedBench, ranks: Ranks, rows: Rows) -> Table:
    """One line per context size, number of queries and budget."""
    builds = {row["n"]: row for row in rows if row["part"] == "build"}
    lines = []
    for row in rows:
        if row["part"] == "answer":
            build = builds[row["n"]]
            lines.append(
                (
                    f"{row['n']:,}",
                    f"{row['m']:,}",
                    "one path" if row["budget"] is None else f"{row['budget']} tokens",
                    quantity(row["us"]),
                    f"{row['messages']}",
                    quantity(row["bytes_per_query"]),
                    f"{row['error']:.1e}" if "error" in row else None,
                    str(row["other_paths"]) if "other_paths" in row else None,
                    quantity(build["us"] / 1e3),
                    quantity(build["stored_bytes"]["part"] / 2**20),
                )
            )
    columns = (
        "n", "m", "reading", "µs per call", "messages", "bytes per query", "error", "other paths", "build, ms", "MiB",
    )  # fmt: skip
    load = "" if run.load is None else f"; load {run.load[0]:.1f} at the start"
    notes = (
        "m: queries of every process; bytes per query: sent to other processes, there and back; MiB: keys and values",
        f"error, other paths: difference to the tree of one process, for at most {options.check:,} tokens",
        f"{describe(run.machine)} per process; fastest of {run.limits.samples} calls or fewer, slowest process{load}",
    )
    title = f"A tree over {ranks.world} process{'es' * (ranks.world > 1)}: width {options.dim}, {run.dtype_name}"
    return Table(title, columns, tuple(lines), notes)
