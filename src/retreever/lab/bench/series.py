"""All models of Human Activity: parameters, time of an epoch of training, and time of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retreever.arguments import check_int
from retreever.lab.bench import figures
from retreever.lab.bench.options_models import SeriesBench
from retreever.lab.bench.report import Row, Rows, Run, progress, quantity, times
from retreever.lab.bench.timing import Call, Timing, time_together
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.lab.tables import Table
from retreever.models.series.latent_ode import LatentModel
from retreever.tasks.activity import ActivityTask
from retreever.train.engine import Trainer

YARDSTICK = "mtand-enc"  # epochs of the others are compared with its own


def measure(options: SeriesBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    check_int("batch", options.batch, 1)
    run = Run.start("series", replace(options, dtype="float32"))
    task = make_recipe("activity").task.make(options.data)
    rows = [model_row(run, options, task, entry) for entry in options.models]
    run.publish(
        rows, [series_table(run, options, rows)], partial(draw_series, run, rows), {"times_mtand": _ratios(rows)}
    )


def model_row(run: Run, options: SeriesBench, task: ActivityTask, entry: str) -> Row:
    """Times of a training step, as training runs it, and of a call of `predict`; both on the same batch size."""
    recipe = recipe_of(entry, options)
    torch.manual_seed(0)
    model: Any = recipe.make_model()
    trainer = Trainer(model, task, recipe.train, str(run.device))
    windows = task.sample(options.batch, task.training(0)).to(run.device)

    def answer() -> None:
        model.eval()
        with torch.inference_mode():
            model.predict(windows.xc, windows.yc, windows.xt)
        model.train()

    step = _time(run, trainer.launch)
    inference = _time(run, answer)
    progress(entry, {"a step": step, "an answer": inference})
    return {
        "name": entry,
        "method": recipe.model.model,
        "state": recipe.model.state,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "step_us": round(1e6 * step.seconds, 1),
        "epoch_s": step.seconds * math.ceil(task.sizes["train"] / options.batch),
        "us": 1e6 * inference.seconds / options.batch,
        "graph": trainer.graphed,
        "evaluations": model.evaluations if isinstance(model, LatentModel) else None,
    }


def recipe_of(entry: str, options: SeriesBench) -> Recipe:
    """Of a model with its defaults, or, for "grud-512", as wide as that."""
    name, _, width = entry.rpartition("-") if entry[-1:].isdigit() else (entry, "", "")
    own: dict[str, Any] = {"state": int(width)} if width else {}
    return make_recipe("activity", model=name, batch=options.batch, solver=options.solver, **own)


def _time(run: Run, call: Call) -> Timing:
    calls: Sequence[Call] = [call]
    return time_together({"": calls}, run.device, "eager", run.limits)[""]


def series_table(run: Run, options: SeriesBench, rows: Rows) -> Table:
    """Table of sizes and times."""
    ratio = {row["name"]: row["ratio"] for row in _ratios(rows)}
    lines = []
    for row in rows:
        epoch, window = f"{row['epoch_s']:.2f}", quantity(row["us"])
        found = (f"{row['step_us'] / 1e3:,.2f}", epoch, times(ratio.get(row["name"])), window)
        lines.append((row["name"], f"{row['parameters']:,}", *found, row["evaluations"]))
    columns = ("model", "parameters", "ms a step", "s an epoch", "epoch / mTAND-Enc", "us a window", "evaluations")
    about = "evaluations: of the net of a latent ODE, in one call; answers are timed eagerly, in batches as in training"
    return Table(f"Models of Human Activity, batch {options.batch}", columns, tuple(lines), (run.footer(), about))


def draw_series(run: Run, rows: Rows, file: Path) -> Path:
    """Draw bars of seconds per epoch."""
    bars = {
        row["name"]: (row["epoch_s"], figures.TREE if row["method"] == "retreever" else figures.FULL) for row in rows
    }
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars({"": bars}, file, f"An epoch of Human Activity, {where}", "seconds (shorter is better)")


def _ratios(rows: Rows) -> list[Row]:
    own = next((row["epoch_s"] for row in rows if row["name"] == YARDSTICK), None)
    if own is None:
        return []
    return [{"name": row["name"], "ratio": float(f"{row['epoch_s'] / own:.4g}")} for row in rows]
