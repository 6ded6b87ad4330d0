"""Latency of one call: tree attention against attention over all tokens, Perceiver IO's read-out and plain torch.

All methods have prepared what depends on the context alone: keys and values of the nodes, or of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.arguments import check_int
from retreever.attention import TreeCrossAttention
from retreever.cross_attention import CrossAttention
from retreever.lab.bench.figures import FULL, PERCEIVER, REFERENCE, TREE, Panel, draw_panels, lines_of
from retreever.lab.bench.options import AttentionBench
from retreever.lab.bench.paper import paper_rows, paper_table
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, progress, quantity, timed, times
from retreever.lab.bench.timing import Call, Mode, time_together
from retreever.lab.tables import Cell, Table
from retreever.ops.search.api import tree_attention
from retreever.tree.plan import TreePlan

Methods = dict[str, Sequence[Call]]
MakeMethods = Callable[[int], Methods]  # from the number of queries


class Part(NamedTuple):
    """A part of the benchmark: the operator or the module, and how it is timed."""

    name: str
    mode: Mode
    prepare: Callable[[Run, AttentionBench, TreePlan], MakeMethods]


def measure(options: AttentionBench) -> None:
    """Run the benchmark and write its files."""
    options = _sizes(options)
    run = Run.start("attention", options)
    parts = Part("operator", "auto", operator_methods), Part("module", "eager", module_methods)
    with torch.inference_mode():
        rows = [row for part in parts for row in latency_rows(run, options, part)]
        paper = paper_rows(run)
    tables = [operator_table(run, options, rows), module_table(run, options, rows), paper_table(run, paper)]
    summary = {"faster_than_all_tokens": _ratios(rows)}
    run.publish(rows + paper, tables, partial(draw_latency, rows, run), summary)


def latency_rows(run: Run, options: AttentionBench, part: Part) -> Iterator[Row]:
    """Rows of all sizes of one part; calls predicted to take too long are marked as skipped."""
    largest: dict[str, tuple[int, float]] = {}  # method -> tokens read by its largest call so far, and its seconds
    for n in options.n:
        plan = TreePlan(n, 2)
        make = part.prepare(run, options, plan)
        for m in options.m:
            methods = make(m)
            work = {name: m * (n if name == FULL else plan.tokens) for name in methods}
            expected = {name: seconds * work[name] / known for name, (known, seconds) in largest.items()}
            skipped = [name for name in methods if expected.get(name, 0.0) > options.slowest]
            kept = {name: calls for name, calls in methods.items() if name not in skipped}
            timings = time_together(kept, run.device, part.mode, run.limits)
            for name, timing in timings.items():
                if work[name] >= largest.get(name, (0, 0.0))[0]:
                    largest[name] = work[name], timing.seconds
            where = {"part": part.name, "n": n, "m": m, "tokens": plan.tokens}
            yield from timed(timings, **where)
            yield from ({**where, "method": name, "skipped": True} for name in skipped)
            progress(f"{part.name}, n={n:,}, m={m:,}", timings)


def operator_methods(run: Run, options: AttentionBench, plan: TreePlan) -> MakeMethods:
    """Projected queries over random keys and values; the time of a search does not depend on the values."""
    h, e = options.heads, options.width
    # As in a `Tree`, key and value of a node are adjacent. The other methods get the layout that is fastest for them.
    keys, values = run.randn(1, plan.nodes, 2, h, e).unbind(dim=2)
    all_keys, all_values = run.randn(1, h, plan.n, e), run.randn(1, h, plan.n, e)
    few_keys, few_values = run.randn(1, h, plan.tokens, e), run.randn(1, h, plan.tokens, e)

    def make(m: int) -> Methods:
        queries = [run.randn(1, m, h, e) for _ in range(options.sets)]
        by_head = [q.transpose(1, 2).contiguous() for q in queries]
        attend = F.scaled_dot_product_attention
        return {
            TREE: [partial(tree_attention, q, keys, values, plan) for q in queries],
            FULL: [partial(attend, q, all_keys, all_values) for q in by_head],
            PERCEIVER: [partial(attend, q, few_keys, few_values) for q in by_head],
            REFERENCE: [partial(tree_attention, q, keys, values, plan, impl="reference") for q in queries],
        }

    return make


def module_methods(run: Run, options: AttentionBench, plan: TreePlan) -> MakeMethods:
    """Whole modules in evaluation, context prepared. Nodes are plain means, which take the same time to search."""
    dim = options.heads * options.width
    tree_module = (
        TreeCrossAttention(dim, options.heads, plan.branch, aggregator="mean").to(run.device, run.dtype).eval()
    )
    full_module = CrossAttention(dim, options.heads).to(run.device, run.dtype).eval()
    context = run.randn(1, plan.n, dim)
    tree, key_values = tree_module.build(context), full_module.build(context)

    def make(m: int) -> Methods:
        queries: list[Tensor] = [run.randn(1, m, dim) for _ in range(options.sets)]
        return {
            TREE: [partial(tree_module, query, tree) for query in queries],
            FULL: [partial(full_module, query, key_values) for query in queries],
        }

    return make


def operator_table(run: Run, options: AttentionBench, rows: Rows) -> Table:
    """Table of the operator: microseconds of every method, and the speed-up of the tree over all tokens."""
    skipped = any(row.get("skipped") for row in rows)
    lines = []
    for (n, m), found in by_size(rows, "operator").items():
        tree, full, perceiver, plain = (_us(found, method) for method in (TREE, FULL, PERCEIVER, REFERENCE))
        tokens = TreePlan(n, 2).tokens
        lines.append((f"{n:,}", f"{m:,}", tokens, tree, full, times(_ratio(found)), perceiver, plain))
    return Table(
        f"One call, µs: {options.heads} heads of {options.width}, {run.dtype_name}, {run.clock}",
        ("n", "m", "tokens", "tree", "all tokens (SDPA)", "speed-up", "Perceiver read-out", "tree, plain torch"),
        tuple(lines),
        (run.footer(), *([f"skipped: predicted to take longer than {options.slowest:g} s a call"] if skipped else [])),
    )


def module_table(run: Run, options: AttentionBench, rows: Rows) -> Table:
    """Table of the modules: microseconds and speed-up."""
    return Table(
        f"Module in evaluation, context prepared, µs: width {options.heads * options.width}, {run.dtype_name}, eager",
        ("n", "m", "TreeCrossAttention", "CrossAttention, keys and values cached", "speed-up"),
        tuple(
            (f"{n:,}", f"{m:,}", _us(found, TREE), _us(found, FULL), times(_ratio(found)))
            for (n, m), found in by_size(rows, "module").items()
        ),
    )


def draw_latency(rows: Rows, run: Run, file: Path) -> Path:
    """Draw the operator above, the module below, one column per number of queries."""
    queries = sorted({row["m"] for row in rows})
    labels = {"operator": f"operator, {run.clock}", "module": "whole module, eager"}
    return draw_panels(
        [[_panel(rows, part, m, top=part == "operator") for m in queries] for part in labels],
        file,
        f"One call over a prepared context, {run.machine['accelerator'] or run.machine['processor']}, {run.dtype_name}",
        "seconds",
        list(labels.values()),
    )


def by_size(rows: Rows, part: str) -> dict[tuple[int, int], dict[str, Row]]:
    """(n, m) -> method -> row, of one part."""
    sizes: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part:
            sizes.setdefault((row["n"], row["m"]), {})[row["method"]] = row
    return sizes


def _panel(rows: Rows, part: str, m: int, top: bool) -> Panel:
    lines = lines_of((row for row in rows if row["part"] == part and row["m"] == m), "us", 1e-6)
    return Panel(f"{m:,} {'query' if m == 1 else 'queries'}" if top else "", lines, (FULL, TREE))


def _ratio(found: Mapping[str, Row]) -> float | None:
    slow, fast = (found.get(name, {}).get("us") for name in (FULL, TREE))
    return None if slow is None or fast is None else slow / fast


def _ratios(rows: Rows) -> list[Row]:
    return [
        {"part": part, "n": n, "m": m, "ratio": None if ratio is None else float(f"{ratio:.4g}")}
        for part in ("operator", "module")
        for (n, m), found in by_size(rows, part).items()
        for ratio in [_ratio(found)]
    ]


def _us(found: Mapping[str, Row], method: str) -> Cell:
    return "skipped" if found[method].get("skipped") else quantity(found[method]["us"])


def _sizes(options: AttentionBench) -> AttentionBench:
    """The options with sizes checked, and fewer of them with `quick`."""
    for name in ("heads", "width", "sets"):
        check_int(name, getattr(options, name), 1)
    n, m = check_sizes("n", options.n), check_sizes("m", options.m)
    if options.quick:
        n, m = tuple(x for x in n if x <= 4096) or n[:1], tuple(x for x in m if x <= 256) or m[:1]
    return replace(options, n=n, m=m)
