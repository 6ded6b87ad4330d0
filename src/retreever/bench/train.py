"""Time of one training step of the copy task: data, forward, backward, clipping and Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retreever.arguments import check_int
from retreever.bench import figures
from retreever.bench.options import TrainBench
from retreever.bench.report import Row, Rows, Run, check_sizes, progress, timed, times
from retreever.bench.timing import Call, time_together
from retreever.models.config import ModelConfig
from retreever.models.retreever import ReTreever, ReTreeverConfig
from retreever.models.transformer_ca import TransformerCA
from retreever.report.tables import Table
from retreever.tasks.copy import VOCABULARY, CopyTask
from retreever.train.config import TrainConfig
from retreever.train.engine import AHEAD, Trainer

CROSS, TREE, PLAIN = "Cross Attention", "TCA", "TCA, plain torch"
AnyModel = TransformerCA | ReTreever


def run_train(options: TrainBench) -> None:
    """The whole benchmark, from options to files. Weights are float32, whatever the device."""
    options = replace(options, dtype="float32")
    run = Run.start("train", options)
    options = _sizes(run, options)
    run = replace(run, options=options)
    rows = [row for n in options.n for row in step_rows(run, CopyTask(n), options)]
    summary: dict[str, Any] = {"faster_than_plain": _ratios(rows)}
    if run.device.type == "cuda":
        summary["engine"] = [engine_overhead(run, CopyTask(n), options) for n in options.n]
    run.publish(rows, [train_table(run, rows)], partial(draw_train, run, rows), summary)


def step_rows(run: Run, task: CopyTask, options: TrainBench) -> Rows:
    """All models and ways to run a step, in turn."""
    config = TrainConfig(batch=options.batch, precision=options.precision)
    methods: dict[str, Sequence[Call]] = {}
    kinds = [
        "eager",
        *(("CUDA graph", "CUDA graph, compiled")[: 1 + options.compile] if run.device.type == "cuda" else ()),
    ]
    for kind in kinds:
        for name, model in models(run).items():
            how = replace(config, graph=kind != "eager", compile=kind.endswith("compiled"))
            methods[f"{name}, {kind}"] = [Trainer(model, task, how, str(run.device)).launch]
    timings = time_together(methods, run.device, "eager", run.limits)
    progress(f"N={task.n:,}, batch {options.batch}", timings)
    rows = timed(timings, n=task.n, batch=options.batch)
    return [{**row, **_split(row["method"], kinds)} for row in rows]


def engine_overhead(run: Run, task: CopyTask, options: TrainBench) -> Row:
    """A step of the training loop, its checks of losses included, against the bare replay of its graph."""
    far = 10**9
    config = TrainConfig(batch=options.batch, steps=far, evaluate_every=far, save_every=far)
    trainer = Trainer(models(run)[TREE], task, config, str(run.device))
    trainer.advance()
    (graph,) = trainer.graphs.values()

    def bare() -> None:
        with torch.cuda.stream(trainer.queue):
            for _ in range(AHEAD):
                graph.replay()

    timings = time_together({"bare": [bare], "engine": [trainer.advance]}, run.device, "eager", run.limits)
    us = {name: round(1e6 * timing.seconds / AHEAD, 2) for name, timing in timings.items()}
    progress(f"engine, N={task.n:,}, {AHEAD} steps", timings)
    return {"n": task.n, "bare_us": us["bare"], "engine_us": us["engine"], "ratio": us["engine"] / us["bare"]}


def models(run: Run) -> dict[str, AnyModel]:
    """Cross attention and the tree, twice: with the fastest backend there is and in plain torch."""
    shared: dict[str, Any] = {"dim_y": VOCABULARY, "inputs": "sequence", "head": "categorical", "dropout": 0.1}
    shared |= {"encoder": "identity"}
    torch.manual_seed(0)
    built: dict[str, AnyModel] = {
        CROSS: TransformerCA(ModelConfig(**shared)),
        TREE: ReTreever(ReTreeverConfig(**shared, order="given")),
        PLAIN: ReTreever(ReTreeverConfig(**shared, order="given", impl="reference")),
    }
    plain_layers(built[PLAIN])
    return {name: model.to(run.device).train() for name, model in built.items()}


def plain_layers(model: nn.Module) -> None:
    """Torch's own dropout and gradients throughout: whatever has kernels of its own says so by `fused`."""
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = False  # type: ignore[assignment]


def train_table(run: Run, rows: Rows) -> Table:
    """Milliseconds and steps per second."""
    found = _by_kind(rows)
    lines = tuple(
        (
            f"{row['n']:,}",
            row["batch"],
            row["model"],
            row["kind"],
            f"{row['us'] / 1e3:,.2f}",
            f"{1e6 / row['us']:,.1f}",
            times(found[row["n"], row["kind"], PLAIN] / row["us"]),
        )
        for row in rows
    )
    columns = ("N", "batch", "model", "step", "ms", "steps/s", "speed-up on plain torch")
    return Table("Training step on the copy task, N/2 context tokens", columns, lines, (run.footer(),))


def draw_train(run: Run, rows: Rows, file: Path) -> Path:
    """Bars of milliseconds, one block per size."""
    colours = {CROSS: figures.FULL, TREE: figures.TREE, PLAIN: figures.REFERENCE}
    groups: dict[str, dict[str, figures.Bar]] = {}
    for row in rows:
        group = groups.setdefault(f"N = {row['n']:,}, batch {row['batch']}", {})
        group[row["method"]] = figures.Bar(row["us"] / 1e3, colours[row["model"]])
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"One training step, {where}", "ms (shorter is better)")


def _split(method: str, kinds: Sequence[str]) -> dict[str, str]:
    kind = next(kind for kind in sorted(kinds, key=len, reverse=True) if method.endswith(kind))
    return {"model": method.removesuffix(f", {kind}"), "kind": kind}


def _by_kind(rows: Rows) -> dict[tuple[int, str, str], float]:
    return {(row["n"], row["kind"], row["model"]): row["us"] for row in rows}


def _ratios(rows: Rows) -> list[Row]:
    found = _by_kind(rows)
    return [
        {"n": n, "kind": kind, "ratio": float(f"{found[n, kind, PLAIN] / us:.4g}")}
        for (n, kind, model), us in found.items()
        if model == TREE
    ]


def _sizes(run: Run, options: TrainBench) -> TrainBench:
    check_int("batch", options.batch, 0)
    small = run.device.type == "cpu"
    n = options.n or ((64,) if small else (256,) if options.quick else (256, 1024))
    return replace(options, n=check_sizes("n", n), batch=options.batch or (64 if small else 128))
