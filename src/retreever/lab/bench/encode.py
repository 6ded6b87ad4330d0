"""Time and memory of encoding a context into a memory, by encoder: what O(n^2) means, and what windows save.

Rows go from short to long contexts, so that the largest memory of the process so far is that of the row. A transformer
is timed as long as the last row says that the next one takes less than `slowest` seconds.
"""

from __future__ import annotations

import resource
import sys
from time import perf_counter
from typing import Any

import torch

from retreever.lab.bench.machine import describe
from retreever.lab.bench.options import EncodeBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, quantity
from retreever.lab.bench.timing import synchronize
from retreever.lab.tables import Table
from retreever.models.retreever import ReTreever

QUADRATIC = ("transformer",)


def measure(options: EncodeBench) -> None:
    """Run the benchmark and write its files."""
    sizes = check_sizes("n", options.n)
    run = Run.start("encode", options)
    rows: Rows = []
    for n in sizes[:1] if options.quick else sizes:
        for encoder in options.encoders:
            rows.append(_row(run, options, encoder, n, rows))
            print(f"n={n:,}, {encoder}: {rows[-1]['seconds']}", file=sys.stderr, flush=True)
    run.publish(rows, [_table(run, options, rows)], None, {})


@torch.no_grad()
def _row(run: Run, options: EncodeBench, encoder: Any, n: int, before: Rows) -> Row:
    """Seconds of one call and the largest memory so far; without a time where it would take too long."""
    last = [row for row in before if row["encoder"] == encoder and row["seconds"] is not None]
    where: Row = {"n": n, "encoder": encoder, "seconds": None, "peak_bytes": None}
    if last and encoder in QUADRATIC and last[-1]["seconds"] * (n / last[-1]["n"]) ** 2 > options.slowest:
        return where
    model = ReTreever(encoder=encoder, order="given", layers=options.layers).to(run.device).eval()
    x = torch.linspace(0, 1, n, device=run.device)[None, :, None]
    synchronize(run.device)
    started = perf_counter()
    model.encode(x, (9 * x).sin())
    synchronize(run.device)
    return {**where, "seconds": perf_counter() - started, "peak_bytes": _peak(run.device)}


def _peak(device: torch.device) -> int:
    """The largest memory of this process so far, or of its tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _table(run: Run, options: EncodeBench, rows: Rows) -> Table:
    lines = []
    for row in rows:
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        lines.append((f"{row['n']:,}", row["encoder"], quantity(row["seconds"]), quantity(peak)))
    load = "" if run.load is None else f"; load {run.load[0]:.1f} at the start"
    notes = (
        f"one call of encode() for one context, tree included; a dash: more than {options.slowest:g} s",
        "MiB: the largest of the whole process so far",
        f"{describe(run.machine)}{load}",
    )
    title = f"Encoding a context: {options.layers} layers, width 64, float32"
    return Table(title, ("n", "encoder", "seconds", "MiB"), tuple(lines), notes)
