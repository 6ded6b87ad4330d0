"""Time of predictions of every model: with its kernels, and by plain torch called from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retreever.arguments import check_int
from retreever.lab.bench import figures
from retreever.lab.bench.options_models import ModelsBench
from retreever.lab.bench.report import Rows, Run, progress, quantity, timed, times
from retreever.lab.bench.timing import Call, time_together
from retreever.lab.bench.train import set_impl
from retreever.lab.recipes.recipe import make_recipe
from retreever.lab.tables import Table

# Models and their latents; 0 takes the default of the model.
MODELS = (
    ("retreever", 0), ("transformer-ca", 0), ("perceiver-io", 0), ("perceiver-io", 32), ("cnp", 0), ("canp", 0),
    ("np", 0), ("anp", 0), ("bnp", 0), ("banp", 0), ("tnpd", 0), ("lbanp", 8), ("lbanp", 128), ("cmanp", 128),
)  # fmt: skip
QUICK = ("retreever", "np", "tnpd")
PREDICT, ANSWER, PLAIN = "predict", "answer", "predict, plain torch"


class Points(NamedTuple):
    """Made-up context and targets."""

    xc: Tensor
    yc: Tensor
    xt: Tensor


def measure(options: ModelsBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    for name in ("contexts", "targets"):
        check_int(name, getattr(options, name), 1)
    run = Run.start("models", replace(options, dtype="float32"))
    rows: Rows = []
    with torch.inference_mode():
        for task in options.tasks:
            for model, latents in MODELS:
                if not options.quick or model in QUICK:
                    rows += model_rows(run, options, task, model, latents)
    run.publish(rows, [models_table(run, rows)], partial(draw_models, run, rows), {})


def model_rows(run: Run, options: ModelsBench, task: str, model: str, latents: int) -> Rows:
    """Times of one model: a whole prediction, an answer from an encoded context, and plain torch."""
    given: dict[str, Any] = {"latents": latents} if latents else {}
    recipe = make_recipe(task, model=model, **given)
    fields, n = recipe.task.model_fields, recipe.task.context
    torch.manual_seed(0)
    fast, plain = (recipe.make_model().eval().to(run.device) for _ in range(2))
    set_impl(plain, "reference")
    points = Points(
        2 * torch.rand(options.contexts, n, fields["dim_x"], device=run.device) - 1,
        torch.rand(options.contexts, n, fields["dim_y"], device=run.device) - 0.5,
        2 * torch.rand(options.contexts, options.targets, fields["dim_x"], device=run.device) - 1,
    )
    memory = fast.encode(points.xc, points.yc)
    calls: dict[str, Sequence[Call]] = {
        PREDICT: [partial(_predict, fast, points)],
        ANSWER: [partial(_answer, fast, memory, points)],
    }
    timings = time_together(calls, run.device, "auto", run.limits)
    timings |= time_together({PLAIN: [partial(_predict, plain, points)]}, run.device, "eager", run.limits)
    progress(f"{task}, {model} {latents or ''}", timings)
    where = {"task": task, "model": model, "latents": latents, "tokens": fast.tokens(n)}
    sizes = {"n": n, "m": options.targets, "contexts": options.contexts}
    rows = timed(timings, **where, **sizes)
    count = options.contexts * options.targets
    return [{**row, "us_per_target": float(f"{row['us'] / count:.5g}")} for row in rows]


def _predict(model: Any, points: Points) -> Tensor:
    return model.predict(*points).mean


def _answer(model: Any, memory: Any, points: Points) -> Tensor:
    return model.answer(memory, points.xt).mean


def models_table(run: Run, rows: Rows) -> Table:
    """Microseconds per predicted point."""
    by_model: dict[tuple[str, str, int], dict[str, float]] = {}
    tokens = {(row["task"], row["model"], row["latents"]): row["tokens"] for row in rows}
    for row in rows:
        times_of = by_model.setdefault((row["task"], row["model"], row["latents"]), {})
        times_of[row["method"]] = row["us_per_target"]
    lines = []
    for (task, model, latents), us in by_model.items():
        name = f"{model}, {latents} latents" if latents else model
        speed = (*(quantity(us[method]) for method in (PREDICT, ANSWER, PLAIN)), times(us[PLAIN] / us[PREDICT]))
        lines.append((task, name, tokens[task, model, latents], *speed))
    columns = ("task", "model", "tokens", "µs per prediction", "µs, context encoded", "µs, plain torch", "speed-up")
    first = rows[0]
    title = f"Predictions, {first['contexts']} contexts with {first['m']} targets each"
    return Table(title, columns, tuple(lines), (run.footer(),))


def draw_models(run: Run, rows: Rows, file: Path) -> Path:
    """Draw bars of microseconds per prediction, one panel per task."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        if row["method"] == PREDICT:
            colour = figures.TREE if row["model"] == "retreever" else figures.FULL
            name = f"{row['model']} {row['latents'] or ''}".strip()
            groups.setdefault(f"{row['task']}, {row['n']} context points", {})[name] = row["us_per_target"], colour
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"One prediction, {where}", "µs (shorter is better)")
