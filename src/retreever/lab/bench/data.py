"""Does data keep up? Time to make one batch of every task, against one training step of the fastest model on it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from retreever.arguments import check_int
from retreever.errors import BackendError, DataError
from retreever.lab.bench import figures
from retreever.lab.bench.options import DataBench
from retreever.lab.bench.report import Row, Rows, Run, progress, timed, times
from retreever.lab.bench.timing import GRAPH_CALLS, Call, Mode, time_together
from retreever.lab.recipes.command import TestableTask
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.lab.recipes.tasks import TASKS
from retreever.lab.tables import Table
from retreever.train.engine import Trainer
from retreever.train.protocols import Padded

DATA = "data"
ENOUGH = 3.0  # times faster than the model


def run_data(options: DataBench) -> None:
    """The whole benchmark, from options to files. Weights are float32, whatever the device."""
    check_int("batch", options.batch, 0)
    options = replace(options, dtype="float32")
    run = Run.start("data", options)
    rows: Rows = []
    skipped: dict[str, str] = {}
    for name in TASKS:
        recipe = make_recipe(name, quick=options.quick)
        if options.batch:
            recipe = recipe.changed(batch=options.batch)
        try:
            task = recipe.task.make(options.data)
            task.sample(1, task.training(0))  # reads the files
        except (DataError, BackendError) as error:
            skipped[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        rows += task_rows(run, recipe, task)
    summary = {
        "slowest_ratio": min(row["ratio"] for row in verdicts(rows)),
        "tasks": verdicts(rows),
        "skipped": skipped,
    }
    run.publish(rows, [data_table(run, rows, skipped)], partial(draw_data, run, rows), summary)


def task_rows(run: Run, recipe: Recipe, task: TestableTask) -> Rows:
    """Batches alone and whole training steps of every model, data included."""
    steps: dict[str, list[Call]] = {}
    for name in recipe.task.models:
        torch.manual_seed(0)
        model = recipe.changed(model=name, residual="auto").resolved().make_model()
        steps[name] = [Trainer(model, task, recipe.train, str(run.device)).launch]
    mode: Mode = "graph" if _graphed(run, task) else "eager"
    timings = {
        **time_together({DATA: makers(run, recipe.train.batch, task)}, run.device, mode, run.limits),
        **time_together(steps, run.device, "eager", run.limits),
    }
    progress(f"{recipe.task.name}, batch {recipe.train.batch}", timings)
    return timed(timings, task=recipe.task.name, batch=recipe.train.batch)


def makers(run: Run, batch: int, task: TestableTask) -> list[Call]:
    """Batches as training makes them: on a GPU, where the task can, padded to some room and inside a CUDA graph."""
    if not _graphed(run, task):
        return [partial(task.sample, batch, task.training(0), run.device)]
    assert isinstance(task, Padded)
    generator, host = torch.cuda.default_generators[run.device.index or 0], task.training(0)
    drawn = [task.draw_sizes(host) for _ in range(GRAPH_CALLS)]
    sizes = torch.tensor([[n, m] for n, m, _ in drawn], device=run.device)
    return [
        partial(task.sample_padded, batch, generator, row, room) for row, (_, _, room) in zip(sizes, drawn, strict=True)
    ]


def verdicts(rows: Rows) -> list[Row]:
    """Of every task the fastest model, what it takes without its data, and how many times faster data is."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = {row["method"]: row for row in rows if row["task"] == task}
        data = mine.pop(DATA)
        fastest = min(mine.values(), key=lambda row: float(row["us"]))
        model = max(0.0, fastest["us"] - data["us"])
        found.append(
            {
                "task": task,
                "batch": data["batch"],
                "model": fastest["method"],
                "data_us": data["us"],
                "step_us": fastest["us"],
                "ratio": float(f"{model / data['us']:.4g}"),
            }
        )
    return found


def data_table(run: Run, rows: Rows, skipped: Mapping[str, str]) -> Table:
    """Milliseconds and examples per second, and whether data is fast enough."""
    lines = tuple(
        (
            row["task"],
            row["batch"],
            f"{row['data_us'] / 1e3:,.3f}",
            f"{1e6 * row['batch'] / row['data_us']:,.0f}",
            row["model"],
            f"{row['step_us'] / 1e3:,.2f}",
            f"{1e6 * row['batch'] / row['step_us']:,.0f}",
            f"{times(row['ratio'])}{'' if row['ratio'] >= ENOUGH else ' (too slow)'}",
        )
        for row in verdicts(rows)
    )
    columns = ("task", "batch", "data, ms", "made/s", "fastest model", "step, ms", "trained on/s", "data is faster")
    note = "a step is data, forward, backward, clipping and Adam; the last column compares it, less its data, with data"
    absent = [f"left out, files absent: {', '.join(skipped)}"] if skipped else []
    return Table("Making batches against training on them", columns, lines, (note, *absent, run.footer()))


def draw_data(run: Run, rows: Rows, file: Path) -> Path:
    """Two bars per task."""
    groups = {
        f"{row['task']}, batch {row['batch']}": {
            "one batch made": figures.Bar(row["data_us"] / 1e3, figures.TREE),
            f"one step, {row['model']}": figures.Bar(row["step_us"] / 1e3, figures.REFERENCE),
        }
        for row in verdicts(rows)
    }
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"Data against training, {where}", "ms (shorter is better)")


def _graphed(run: Run, task: TestableTask) -> bool:
    return run.device.type == "cuda" and isinstance(task, Padded)
