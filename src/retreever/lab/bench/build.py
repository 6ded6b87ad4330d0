"""Time to build a tree, whole and in parts, compared with the bare matrix products of its linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from retreever.attention import TreeCrossAttention
from retreever.lab.bench.figures import BUILD, BUILD_GRAPH, PRODUCTS, PRODUCTS_GRAPH, Panel, draw_panels, lines_of
from retreever.lab.bench.options import BY_FOUR, BuildBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, progress, quantity, timed, times
from retreever.lab.bench.timing import Call, Mode, time_together
from retreever.lab.tables import Table, number
from retreever.tree.build import build_nodes
from retreever.tree.order import leaf_layout
from retreever.tree.plan import TreePlan

PAPER_TOKENS = 256
LAYOUT, AGGREGATE, WHOLE = "layout", "aggregation", "whole build, with keys and values"
PUBLISHED = {LAYOUT: 0.076, AGGREGATE: 12.864}  # milliseconds


def measure(options: BuildBench) -> None:
    """Run the benchmark and write its files."""
    run = Run.start("build", options)
    options = replace(options, n=_sizes(run, options))
    run = replace(run, options=options)
    module = TreeCrossAttention(options.dim, options.heads, options.branch).to(run.device, run.dtype).eval()
    modes: tuple[Mode, ...] = ("eager", "graph") if run.device.type == "cuda" else ("eager",)
    with torch.inference_mode():
        rows = [row for n in options.n for mode in modes for row in build_rows(run, module, n, mode)]
        parts = part_rows(run, module)
    tables = build_table(run, options, rows, modes), part_table(parts)
    run.publish(rows + parts, tables, partial(draw_build, run, rows), {"times_products": _ratios(rows)})


def build_rows(run: Run, module: TreeCrossAttention, n: int, mode: Mode) -> Rows:
    """Rows of the build and of its bare matrix products, timed in turn."""
    context = run.randn(1, n, module.block.to_kv.in_features)
    eager = mode == "eager"
    methods: dict[str, Sequence[Call]] = {
        BUILD if eager else BUILD_GRAPH: [partial(module.build, context)],
        PRODUCTS if eager else PRODUCTS_GRAPH: [matrix_products(run, module, TreePlan(n, module.branch))],
    }
    timings = time_together(methods, run.device, mode, run.limits)
    progress(f"n={n:,}", timings)
    return timed(timings, part="build", n=n, kind=mode)


def matrix_products(run: Run, module: TreeCrossAttention, plan: TreePlan) -> Call:
    """A call of the matrix products of all linear layers of a build, into preallocated memory."""
    inner = [layer for layer in aggregator_of(module).modules() if isinstance(layer, nn.Linear)]
    levels = [plan.leaves, *(plan.branch**level for level in range(plan.depth, 1, -1))] if plan.depth else []
    layers = [(rows, layer) for rows in levels for layer in inner] + [(plan.nodes, module.block.to_kv)]
    jobs = [
        (run.randn(rows, layer.in_features), layer.weight.t(), run.randn(rows, layer.out_features))
        for rows, layer in layers
    ]

    def multiply() -> None:
        for left, right, product in jobs:
            torch.mm(left, right, out=product)

    return multiply


def aggregator_of(module: TreeCrossAttention) -> nn.Module:
    """The aggregator, which a tree of means does not have."""
    assert module.aggregator is not None
    return module.aggregator


def part_rows(run: Run, module: TreeCrossAttention) -> Rows:
    """Rows of what the paper times at 256 tokens: layout and aggregation of the tree."""
    context = run.randn(1, PAPER_TOKENS, module.block.to_kv.in_features)
    lengths = torch.tensor([PAPER_TOKENS], device=run.device)

    def layout() -> None:
        leaf_layout(TreePlan(PAPER_TOKENS, module.branch), lengths)

    methods: dict[str, Sequence[Call]] = {
        LAYOUT: [layout],
        AGGREGATE: [partial(build_nodes, context, aggregator_of(module), module.branch)],
        WHOLE: [partial(module.build, context)],
    }
    timings = time_together(methods, run.device, "eager", run.limits)
    progress(f"parts, n={PAPER_TOKENS}", timings)
    rows = timed(timings, part="parts", n=PAPER_TOKENS)
    return [{**row, "paper_ms": PUBLISHED.get(row["method"])} for row in rows]


def build_table(run: Run, options: BuildBench, rows: Rows, modes: Sequence[Mode]) -> Table:
    """Table of milliseconds against n, eager and with CUDA graphs."""
    names = [(BUILD, PRODUCTS)] + [(BUILD_GRAPH, PRODUCTS_GRAPH)] * (len(modes) > 1)
    found = {(row["n"], row["method"]): row["us"] for row in rows}
    lines = []
    for n in options.n:
        cells: list[str | None] = [f"{n:,}"]
        for build, products in names:
            slow, bare = found[n, build], found[n, products]
            cells += [f"{slow / 1e3:,.3f}", f"{bare / 1e3:,.3f}", times(slow / bare)]
        lines.append((*cells, quantity(1e3 * found[n, names[-1][0]] / n)))
    columns = [f"{column}{kind}" for kind in ("", ", graph")[: len(names)] for column in ("build", "products", "ratio")]
    return Table(
        f"Tree building, ms: branch {options.branch}, width {options.dim}, transformer aggregator, {run.dtype_name}",
        ("n", *columns, "ns/token"),
        tuple(lines),
        (run.footer(), "products: the matrix products of the same linear layers on the same rows, and nothing else"),
    )


def part_table(parts: Rows) -> Table:
    """Table of the parts of a build beside the paper's numbers."""
    lines = tuple((row["method"], f"{row['us'] / 1e3:.3f}", number(row["paper_ms"], 3)) for row in parts)
    return Table(f"Parts of a build, {PAPER_TOKENS} tokens, eager", ("part", "ms", "paper, ms"), lines)


def draw_build(run: Run, rows: Rows, file: Path) -> Path:
    """Draw time against tokens."""
    lines = lines_of(rows, "us", 1e-6)
    where = run.machine["accelerator"] or run.machine["processor"]
    return draw_panels([[Panel("", lines)]], file, f"Building a tree, {where}, {run.dtype_name}", "seconds", ["time"])


def _ratios(rows: Rows) -> list[Row]:
    found = {(row["n"], row["method"]): row["us"] for row in rows}
    pairs = ((BUILD, PRODUCTS), (BUILD_GRAPH, PRODUCTS_GRAPH))
    return [
        {"n": n, "method": build, "ratio": float(f"{us / found[n, bare]:.4g}")}
        for (n, method), us in found.items()
        for build, bare in pairs
        if method == build
    ]


def _sizes(run: Run, options: BuildBench) -> tuple[int, ...]:
    largest = 4096 if options.quick else 1 << 16 if run.device.type == "cpu" else 1 << 20
    return check_sizes("n", options.n or tuple(n for n in BY_FOUR if n <= largest))
