"""Time of one training step (data, forward, backward, clipping, Adam), with and without each kernel and compiled."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from retreever.arguments import check_int
from retreever.errors import BackendError, DataError
from retreever.lab.bench import figures
from retreever.lab.bench.options import TrainBench
from retreever.lab.bench.report import Row, Rows, Run, progress, timed, times
from retreever.lab.bench.timing import Call, time_together
from retreever.lab.recipes.models import NEURAL_PROCESSES
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.lab.tables import Table
from retreever.ops.backend import Impl, Operator, without
from retreever.train.engine import AHEAD, Trainer
from retreever.train.protocols import Task

CROSS, PLAIN, SEARCH, ALL = "all tokens", "tree, plain torch", "tree, search kernel", "tree, all kernels"
COMPILED, EAGER = ", compiled", ", plain torch"
LINES: tuple[Operator, ...] = ("attention", "aggregate")  # operators with kernels besides the search


class Variant(NamedTuple):
    """A way to run a training step."""

    searches: bool
    impl: Impl
    without: tuple[Operator, ...] = ()
    compiled: bool = False
    model: str = ""  # a neural process, by plain torch without a CUDA graph where `impl` is "reference"


def measure(options: TrainBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    check_int("batch", options.batch, 0)
    run = Run.start("train", replace(options, dtype="float32"))
    rows: Rows = []
    failed: dict[str, str] = {}
    for name in options.tasks:
        recipe = recipe_for(run, name, options)
        try:
            task = recipe.task.make(options.data)
            task.sample(1, task.training(0))  # reads the files
        except (DataError, BackendError) as error:
            failed[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        rows += task_rows(run, recipe, task, options, failed)
    summary: dict[str, Any] = {"faster_than_plain": _ratios(rows), "failed": failed}
    if run.device.type == "cuda":
        summary["engine"] = engine_overhead(run, recipe_for(run, "copy", options))
    run.publish(rows, [train_table(run, rows)], partial(draw_train, run, rows), summary)


def recipe_for(run: Run, task: str, options: TrainBench) -> Recipe:
    """The recipe of `task`, in sizes that suit the device."""
    small = run.device.type == "cpu"
    given: dict[str, Any] = {"precision": options.precision}
    if task == "copy":
        given |= {"n": options.n or (64 if small else 256), "batch": 64 if small else 128}
    elif small:
        given["batch"] = 16
    if options.batch:
        given["batch"] = options.batch
    return make_recipe(task, quick=options.quick, **given)


def variants(cuda: bool, compiled: bool) -> dict[str, Variant]:
    """All ways to run a step on a device, by name."""
    found = {CROSS: Variant(False, "auto"), PLAIN: Variant(True, "reference"), SEARCH: Variant(True, "auto", LINES)}
    if cuda:
        found[ALL] = Variant(True, "auto")
    if compiled:
        fastest = list(found)[-1]
        found[f"{fastest}{COMPILED}"] = found[fastest]._replace(compiled=True)
    return found


def neural_processes(recipe: Recipe) -> dict[str, Variant]:
    """The neural processes of a task, each with kernels and in plain torch, by name."""
    names = [name for name in NEURAL_PROCESSES if name in recipe.task.models]
    found = {name: Variant(False, "auto", model=name) for name in names}
    return found | {f"{name}{EAGER}": Variant(False, "reference", model=name) for name in names}


def task_rows(run: Run, recipe: Recipe, task: Task, options: TrainBench, failed: dict[str, str]) -> Rows:
    """Rows of all variants, timed in turn; compilation errors are added to `failed`."""
    methods: dict[str, Sequence[Call]] = {}
    chosen = variants(run.device.type == "cuda", options.compile)
    chosen |= neural_processes(recipe) if options.neural_processes else {}
    for name, variant in chosen.items():
        step = make_step(run, recipe, task, variant)
        try:
            step()
            methods[name] = [step]
        except Exception as error:
            if not variant.compiled:
                raise
            failed[f"{recipe.task.name}, {name}"] = " ".join(f"{type(error).__name__} {error}".split())[:400]
            print(f"{recipe.task.name}, {name}: failed to compile", file=sys.stderr)
    timings = time_together(methods, run.device, "eager", run.limits)
    progress(f"{recipe.task.name}, batch {recipe.train.batch}", timings)
    return timed(timings, task=recipe.task.name, batch=recipe.train.batch)


def make_step(run: Run, recipe: Recipe, task: Task, variant: Variant) -> Call:
    """One training step in a variant, as training does it: on a GPU in a CUDA graph."""
    torch.manual_seed(0)
    model = _recipe_of(variant, recipe).make_model()
    set_impl(model, variant.impl)
    eager = bool(variant.model) and variant.impl == "reference"
    config = replace(recipe.train, compile=variant.compiled, graph=not eager)
    trainer = Trainer(model, task, config, str(run.device))

    def step() -> None:
        with without(*variant.without):
            trainer.launch()

    return step


def _recipe_of(variant: Variant, recipe: Recipe) -> Recipe:
    """The recipe with the model of a variant."""
    if variant.model:
        return make_recipe(recipe.task.name, quick=recipe.quick, model=variant.model)
    kinds = recipe.task.models
    return recipe.changed(model=kinds[0] if variant.searches else kinds[1])


def set_impl(model: torch.nn.Module, impl: Impl) -> None:
    """Set the backend of all layers of `model` to `impl`."""
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = impl  # type: ignore[assignment]


def engine_overhead(run: Run, recipe: Recipe) -> Row:
    """Time of a step of the training loop, with its checks of losses, against the bare replay of its graph."""
    far = 10**9
    config = replace(recipe.train, steps=far, evaluate_every=far, save_every=far)
    trainer = Trainer(recipe.make_model(), recipe.task.make(None), config, str(run.device))
    trainer.advance()
    (graph,) = trainer.graphs.values()

    def bare() -> None:
        with torch.cuda.stream(trainer.queue):
            for _ in range(AHEAD):
                graph.replay()

    timings = time_together({"bare": [bare], "engine": [trainer.advance]}, run.device, "eager", run.limits)
    us = {name: round(1e6 * timing.seconds / AHEAD, 2) for name, timing in timings.items()}
    progress(f"engine, {AHEAD} steps", timings)
    return {"bare_us": us["bare"], "engine_us": us["engine"], "ratio": us["engine"] / us["bare"]}


def train_table(run: Run, rows: Rows) -> Table:
    """Table of milliseconds and steps per second."""
    ratios = {(found["task"], found["method"]): found["ratio"] for found in _ratios(rows)}
    lines = []
    for row in rows:
        task, us, method = row["task"], row["us"], row["method"]
        speed = (f"{us / 1e3:,.2f}", f"{1e6 / us:,.1f}", times(ratios[task, method]))
        lines.append((task, row["batch"], method, *speed))
    columns = ("task", "batch", "variant", "ms", "steps/s", "speed-up on plain torch")
    how = "one CUDA graph a step" if run.device.type == "cuda" else "eager"
    return Table(f"Training step, {how}", columns, tuple(lines), (run.footer(),))


def draw_train(run: Run, rows: Rows, file: Path) -> Path:
    """Draw bars of milliseconds, one panel per task."""
    colours = {CROSS: figures.FULL, PLAIN: figures.REFERENCE}
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        group = groups.setdefault(f"{row['task']}, batch {row['batch']}", {})
        colour = colours.get(row["method"].removesuffix(COMPILED), figures.TREE)
        group[row["method"]] = row["us"] / 1e3, colour
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"One training step, {where}", "ms (shorter is better)")


def _ratios(rows: Rows) -> list[Row]:
    """How many times faster than plain torch; a neural process is compared with itself."""
    us = {(row["task"], row["method"]): row["us"] for row in rows}
    found = []
    for (task, method), time in us.items():
        own = method if method.endswith(EAGER) else f"{method}{EAGER}"
        plain = us.get((task, own), us[task, PLAIN])
        found.append({"task": task, "method": method, "ratio": float(f"{plain / time:.4g}")})
    return found
