"""Peak memory of one inference call beyond its inputs, against the number of context tokens (the paper's figure).

What is stored between calls, the tree or the cached keys and values, is an input and has its own column.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from retreever.attention import TreeCrossAttention
from retreever.cross_attention import CrossAttention
from retreever.errors import BackendError
from retreever.lab.bench.figures import CACHED, RAW, TREE, Panel, draw_panels, lines_of
from retreever.lab.bench.machine import describe
from retreever.lab.bench.options import MemoryBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, quantity, times
from retreever.lab.bench.timing import synchronize
from retreever.lab.tables import Table

SMALL, LARGE = 1 << 10, 1 << 20  # growth is reported between these


def measure(options: MemoryBench) -> None:
    """Run the benchmark and write its files."""
    n, m = check_sizes("n", options.n), check_sizes("m", options.m)
    options = replace(options, n=tuple(x for x in n if x <= 1 << 14) or n[:1] if options.quick else n, m=m)
    run = Run.start("memory", options)
    with torch.inference_mode():
        rows = [row for n in options.n for row in memory_rows(run, options, n)]
    summary = {"growth": [growth(rows, m, method) for m in options.m for method in (TREE, CACHED, RAW)]}
    run.publish(rows, [memory_table(run, options, rows)], partial(draw_memory, run, options, rows), summary)


def memory_rows(run: Run, options: MemoryBench, n: int) -> Rows:
    """Rows of one context size, all numbers of queries. Nodes are plain means, which take the same memory to read."""
    dim, heads = options.dim, options.heads
    tree_module = TreeCrossAttention(dim, heads, aggregator="mean").to(run.device, run.dtype).eval()
    full_module = CrossAttention(dim, heads).to(run.device, run.dtype).eval()
    context = run.randn(1, n, dim)
    tree, cached = tree_module.build(context), full_module.build(context)
    stored = {
        TREE: size_of(tree.keys, tree.values),
        CACHED: size_of(cached.keys, cached.values),
        RAW: size_of(context),
    }
    rows: Rows = []
    for m in options.m:
        query = run.randn(1, m, dim)
        calls: dict[str, Callable[[], object]] = {
            TREE: partial(tree_module, query, tree),
            CACHED: partial(full_module, query, cached),
            RAW: partial(full_module, query, context),
        }
        for method, call in calls.items():
            peak = peak_bytes(call, run.device)
            rows.append({"n": n, "m": m, "method": method, "bytes": peak, "stored_bytes": stored[method]})
    return rows


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory of `call`, including its result, beyond what was allocated before."""
    call()  # compiles kernels and allocates workspaces, which do not count
    synchronize(device)
    if device.type == "cpu":
        return _peak_of_profile(call)
    if device.type != "cuda":
        raise BackendError(f"device: the peak memory of a call can be seen on cpu and cuda, not on {device.type}")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def size_of(*tensors: Tensor) -> int:
    """Bytes of all elements of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def growth(rows: Rows, m: int, method: str, small: int = SMALL, large: int = LARGE) -> Row:
    """Ratio of the memory of a call for the largest and the smallest context between `small` and `large`."""
    found = {row["n"]: row["bytes"] for row in rows if row["m"] == m and row["method"] == method}
    inside = [n for n in sorted(found) if small <= n <= large] or sorted(found)
    first, last = inside[0], inside[-1]
    return {"method": method, "m": m, "from": first, "to": last, "factor": float(f"{found[last] / found[first]:.4g}")}


def memory_table(run: Run, options: MemoryBench, rows: Rows) -> Table:
    """Table of the peak memory of a call and of the memory stored between calls."""
    found = {(row["n"], row["m"], row["method"]): row for row in rows}
    lines = []
    for m in options.m:
        for n in options.n:
            peaks = (quantity(found[n, m, method]["bytes"] / 2**10) for method in (TREE, CACHED, RAW))
            stored = (quantity(found[n, m, method]["stored_bytes"] / 2**10) for method in (TREE, CACHED))
            lines.append((f"{m:,}", f"{n:,}", *peaks, *stored))
    notes = ["stored: keys and values; a tree with learned nodes also keeps their embeddings, half as much again"]
    for m in options.m:
        tree, cached = growth(rows, m, TREE), growth(rows, m, CACHED)
        grown = f"the tree's peak grows {times(tree['factor'])}, that of cached attention {times(cached['factor'])}"
        notes.append(f"m={m:,}: {grown}, from n={tree['from']:,} to {tree['to']:,}")
    columns = ("m", "n", "tree", "all tokens, cached", "all tokens, raw", "stored: tree", "stored: cache")
    title = (
        f"Peak memory of one call beyond its inputs, KiB: width {options.dim}, {options.heads} heads, {run.dtype_name}"
    )
    return Table(title, columns, tuple(lines), (*notes, describe(run.machine)))


def draw_memory(run: Run, options: MemoryBench, rows: Rows, file: Path) -> Path:
    """One panel per number of queries; the ratio shown is to cached attention, which is as well prepared as a tree."""
    panels = []
    for m in options.m:
        lines = lines_of((row for row in rows if row["m"] == m), "bytes", 1.0)
        panels.append(Panel(f"{m:,} {'query' if m == 1 else 'queries'}", lines, (CACHED, TREE)))
    title = f"Peak memory of one call beyond its inputs, {run.device.type}, {run.dtype_name}"
    return draw_panels([panels], file, title, "bytes", ["peak memory"])


def _peak_of_profile(call: Callable[[], object]) -> int:
    """Largest running sum of the allocations and releases of torch's CPU allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from writing to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = call()
    del result  # freed outside: the result counts until the end
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(accumulate((change for _, change in changes), initial=0))
