"""Time of a training step on one context of many points: attention over all tokens, and the ways to train a tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retreever.arguments import check_int
from retreever.batch import Batch
from retreever.lab.bench import figures
from retreever.lab.bench.options_models import StepsBench
from retreever.lab.bench.report import Rows, Run, check_sizes, progress, timed, times
from retreever.lab.bench.timing import Call, time_together
from retreever.lab.tables import Table
from retreever.models.retreever import ReTreever
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.train.staged import nodes_alone, teaching

PATHS = torch.Generator()  # of paths and budgets
ALL = "all tokens"
SCRATCH, LEAN = "tree from scratch", "from scratch, mean_levels=3, share=0.25"
NODES, HIGH, WIDE = "nodes of a tree", "its nodes, mean_levels=4", "nodes of a tree of 8"
READ = "its nodes, for 2 % read"
WHOLE = "all of a tree of 16"
SECOND = (NODES, HIGH, WIDE, READ)  # as in the second stage of `fit_staged`


def makers(settings: dict[str, Any], n: int) -> dict[str, Callable[[], Any]]:
    """The models by name, for contexts of n points."""
    convert = partial(ReTreever.from_transformer_ca, objective=teaching(0))
    return {
        ALL: lambda: TransformerCA(**settings),
        SCRATCH: lambda: ReTreever(**settings),
        LEAN: lambda: ReTreever(**settings, mean_levels=3, objective=ObjectiveConfig(share=0.25)),
        NODES: lambda: convert(TransformerCA(**settings)),
        HIGH: lambda: convert(TransformerCA(**settings), mean_levels=4),
        WIDE: lambda: convert(TransformerCA(**settings), branch=8),
        READ: lambda: convert(TransformerCA(**settings), objective=teaching(n // 50)),
        WHOLE: lambda: convert(TransformerCA(**settings), objective=teaching(0, "all"), branch=16, mean_levels=1),
    }


def measure(options: StepsBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    sizes = check_sizes("n", options.n)
    for name in ("queries", "dim", "contexts"):
        check_int(name, getattr(options, name), 1)
    run = Run.start("steps", replace(options, dtype="float32"))
    rows: Rows = []
    for n in sizes[:1] if options.quick else sizes:
        with ExitStack() as frozen:
            timings = time_together(_steps(run, options, n, frozen), run.device, "eager", run.limits)
        progress(f"n={n:,}", timings)
        rows += timed(timings, n=n, m=options.queries)
    run.publish(rows, [_table(run, options, rows)], partial(_draw, run, rows), {})


def _steps(run: Run, options: StepsBench, n: int, frozen: ExitStack) -> dict[str, list[Call]]:
    """A step of every model: forward, backward, Adam."""
    settings = {"dim_x": 2, "dim": options.dim, "hidden": 2 * options.dim, "encoder": "identity", "head": "point"}
    x, xt = (torch.rand(options.contexts, count, 2, device=run.device) for count in (n, options.queries))
    batch = Batch(x, x.sum(dim=-1, keepdim=True), xt, xt.sum(dim=-1, keepdim=True))
    found: dict[str, list[Call]] = {}
    for name, make in makers(settings, n).items():
        model = make().to(run.device).train()
        if name in SECOND:
            frozen.enter_context(nodes_alone(model))
        learned = [weight for weight in model.parameters() if weight.requires_grad]
        found[name] = [partial(_step, model, torch.optim.Adam(learned, fused=True), batch)]
    return found


def _step(model: Any, optimiser: torch.optim.Optimizer, batch: Batch) -> None:
    draws = (model.draws_for(batch, PATHS),) if isinstance(model, ReTreever) else ()
    optimiser.zero_grad()
    torch.autograd.backward(model.loss(batch, *draws).total)
    optimiser.step()


def _table(run: Run, options: StepsBench, rows: Rows) -> Table:
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for n in dict.fromkeys(row["n"] for row in rows):
        us = {row["method"]: row["us"] for row in rows if row["n"] == n}
        ratios = (f"{us[name] / 1e3:.1f} ({times(us[name] / us[ALL])})" for name in names[1:])
        lines.append((f"{n:,}", f"{us[ALL] / 1e3:.1f}", *ratios))
    notes = (
        "forward, backward and Adam; in brackets: as a multiple of all tokens",
        "nodes of a tree: the second stage of fit_staged, in which the nodes alone learn; all: with learn='all'",
        run.footer(),
    )
    title = f"ms per training step: {options.contexts} context, {options.queries} queries, width {options.dim}"
    return Table(title, ("n", *names), tuple(lines), notes)


def _draw(run: Run, rows: Rows, file: Path) -> Path:
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        colour = figures.FULL if row["method"] == ALL else figures.TREE
        groups.setdefault(f"{row['n']:,} points", {})[row["method"]] = row["us"] / 1e3, colour
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"A training step, {where}", "ms (shorter is better)")
