"""Latency of one call: tree attention against attention over all tokens, Perceiver IO's read-out and plain torch.

All methods have prepared what depends on the context alone: keys and values of the nodes, or of the tokens. The tree is
read along one path, and with a budget of four times as many tokens.
"""

from __future__ import annotations

import sys
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
from retreever.lab.bench.figures import BUDGET, FULL, PERCEIVER, REFERENCE, TREE, Panel, draw_panels, lines_of
from retreever.lab.bench.options import AttentionBench
from retreever.lab.bench.paper import paper_rows, paper_table
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, progress, quantity, timed, times
from retreever.lab.bench.timing import Call, Mode, time_together
from retreever.lab.tables import Cell, Table
from retreever.ops.search.api import tree_attention
from retreever.tree.plan import TreePlan

Methods = dict[str, Sequence[Call]]
MakeMethods = Callable[[int], Methods]  # from the number of queries
COMPILED = "compiled module"
COMPILED_QUERIES = (1, 256)


class Part(NamedTuple):
    """A part of the benchmark: the operator or the module, and how it is timed."""

    name: str
    mode: Mode
    prepare: Callable[[Run, AttentionBench, TreePlan], MakeMethods]


def measure(options: AttentionBench) -> None:
    """Run the benchmark and write its files."""
    options = _sizes(options)
    run = Run.start("attention", options)
    parts = [Part("module", "eager", module_methods), Part("operator", "auto", operator_methods)]
    failed: dict[str, str] = {}
    with torch.inference_mode():
        rows = [row for part in parts for row in latency_rows(run, options, part)]
        if options.compile:
            rows += compiled_rows(run, options, failed)
        paper = paper_rows(run)
    tables = [module_table(run, options, rows, part) for part in ("module", COMPILED) if by_size(rows, part)]
    tables += [operator_table(run, options, rows), paper_table(run, paper)]
    summary = {"faster_than_all_tokens": _ratios(rows), "failed": failed}
    run.publish(rows + paper, tables, partial(draw_latency, rows, run), summary)


def latency_rows(run: Run, options: AttentionBench, part: Part) -> Iterator[Row]:
    """Rows of all sizes of one part; calls predicted to take too long are marked as skipped."""
    largest: dict[str, tuple[int, float]] = {}  # method -> tokens read by its largest call so far, and its seconds
    for n in options.n:
        plan = TreePlan(n, 2)
        make = part.prepare(run, options, plan)
        for m in options.m:
            methods = make(m)
            read = {FULL: n, BUDGET: four_paths(plan)}
            work = {name: m * read.get(name, plan.tokens) for name in methods}
            expected = {name: seconds * work[name] / known for name, (known, seconds) in largest.items()}
            skipped = [name for name in methods if expected.get(name, 0.0) > options.slowest]
            kept = {name: calls for name, calls in methods.items() if name not in skipped}
            timings = time_together(kept, run.device, part.mode, run.limits)
            for name, timing in timings.items():
                if work[name] >= largest.get(name, (0, 0.0))[0]:
                    largest[name] = work[name], timing.seconds
            where = {"part": part.name, "n": n, "m": m}
            found = timed(timings, **where) + [{**where, "method": name, "skipped": True} for name in skipped]
            yield from ({**row, "tokens": read.get(row["method"], plan.tokens)} for row in found)
            progress(f"{part.name}, n={n:,}, m={m:,}", timings)


def compiled_rows(run: Run, options: AttentionBench, failed: dict[str, str]) -> Rows:
    """Rows of the compiled modules; an error of the compiler ends them and is added to `failed`."""
    few = replace(options, m=tuple(m for m in options.m if m in COMPILED_QUERIES) or options.m[:1])
    rows: Rows = []
    try:
        for row in latency_rows(run, few, Part(COMPILED, "eager", compiled_methods)):
            rows.append(row)
    except Exception as error:  # the other rows are not lost
        failed[COMPILED] = " ".join(f"{type(error).__name__} {error}".split())[:400]
        print(f"{COMPILED}: {failed[COMPILED]}", file=sys.stderr)
    return rows


def four_paths(plan: TreePlan) -> int:
    """The budget that is timed beside one path."""
    return min(plan.n, 4 * plan.tokens)


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
            BUDGET: [partial(tree_attention, q, keys, values, plan, budget=four_paths(plan)) for q in queries],
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
            BUDGET: [partial(tree_module, query, tree, budget=four_paths(plan)) for query in queries],
            FULL: [partial(full_module, query, key_values) for query in queries],
        }

    return make


def compiled_methods(run: Run, options: AttentionBench, plan: TreePlan) -> MakeMethods:
    """The modules of `module_methods`, compiled; on a GPU a call replays a CUDA graph.

    Tensors of the prepared context are marked static, otherwise every replay would copy them.
    """
    torch.compiler.reset()  # the number of compiled variants of a function is limited
    make = module_methods(run, options, plan)
    mode = "reduce-overhead" if run.device.type == "cuda" else "default"

    def compiled(m: int) -> Methods:
        methods: Methods = {}
        for name, calls in make(m).items():
            module, (_, context) = calls[0].func, calls[0].args  # type: ignore[attr-defined]
            for tensor in (context.keys, context.values):
                torch._dynamo.mark_static_address(tensor)
            fast = torch.compile(module, mode=mode, dynamic=False)
            methods[name] = [partial(fast, *call.args, **call.keywords) for call in calls]  # type: ignore[attr-defined]
        return methods

    return compiled


def operator_table(run: Run, options: AttentionBench, rows: Rows) -> Table:
    """Table of the operator: microseconds of every method, and the speed-up of the tree over all tokens."""
    skipped = any(row.get("skipped") for row in rows)
    lines = []
    for (n, m), found in by_size(rows, "operator").items():
        trees = [cell for name in (TREE, BUDGET) for cell in (_us(found, name), times(_ratio(found, name)))]
        rest = [_us(found, name) for name in (FULL, PERCEIVER, REFERENCE)]
        lines.append((f"{n:,}", f"{m:,}", found[TREE]["tokens"], *trees, *rest))
    others = ("all tokens (SDPA)", "Perceiver read-out", "tree, plain torch")
    return Table(
        f"The operator alone, one call, µs: {options.heads} heads of {options.width}, {run.dtype_name}, {run.clock}",
        ("n", "m", "tokens", "tree", "speed-up", "4x tokens", "speed-up, 4x", *others),
        tuple(lines),
        (run.footer(), *([f"skipped: predicted to take longer than {options.slowest:g} s a call"] if skipped else [])),
    )


def module_table(run: Run, options: AttentionBench, rows: Rows, part: str = "module") -> Table:
    """Table of the modules: microseconds and speed-up."""
    lines = []
    for (n, m), found in by_size(rows, part).items():
        trees = [cell for name in (TREE, BUDGET) for cell in (_us(found, name), times(_ratio(found, name)))]
        lines.append((f"{n:,}", f"{m:,}", *trees, _us(found, FULL)))
    how = "eager" if part == "module" else "torch.compile"
    return Table(
        f"Module in evaluation, context prepared, µs: width {options.heads * options.width}, {run.dtype_name}, {how}",
        ("n", "m", "TreeCrossAttention", "speed-up", "4x tokens", "speed-up, 4x", "CrossAttention, cached"),
        tuple(lines),
    )


def draw_latency(rows: Rows, run: Run, file: Path) -> Path:
    """Draw the module above, compiled below if it was timed, then the operator; one column per number of queries."""
    queries = sorted({row["m"] for row in rows})
    labels = {"module": "whole module, eager", COMPILED: COMPILED, "operator": f"operator, {run.clock}"}
    labels = {part: label for part, label in labels.items() if by_size(rows, part)}
    return draw_panels(
        [[_panel(rows, part, m, top=part == "module") for m in queries] for part in labels],
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


def _ratio(found: Mapping[str, Row], method: str = TREE) -> float | None:
    slow, fast = (found.get(name, {}).get("us") for name in (FULL, method))
    return None if slow is None or fast is None else slow / fast


def _ratios(rows: Rows) -> list[Row]:
    return [
        {"part": part, "n": n, "m": m, "method": name, "ratio": None if ratio is None else float(f"{ratio:.4g}")}
        for part in ("module", COMPILED, "operator")
        for (n, m), found in by_size(rows, part).items()
        for name in (TREE, BUDGET)
        for ratio in [_ratio(found, name)]
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
