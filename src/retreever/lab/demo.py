"""The demo: Cross Attention, Perceiver IO and TCA on the copy task, with a table, curves and one search drawn."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retreever.attention_inputs import check_budget
from retreever.errors import InputError
from retreever.files import write_text
from retreever.lab.bench.machine import machine
from retreever.lab.figures.retrieval import draw_curves
from retreever.lab.recipes.figures import draw_search
from retreever.lab.recipes.recipe import make_recipe
from retreever.lab.tables import Table
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.tasks.copy import CopyTask
from retreever.train import fit
from retreever.train.config import TrainConfig
from retreever.train.log import Board
from retreever.train.protocols import Record, as_rows
from retreever.train.score import evaluate

NAMES = ("Cross Attention", "Tree Cross Attention", "Perceiver IO")
TRAIN = TrainConfig(steps=1_500, batch=64, warmup=100, evaluate_every=50, stop_at=99.9)


@dataclass(frozen=True)
class Outcome:
    """One model of the demo, trained and measured."""

    name: str
    accuracy: float
    tokens: int
    microseconds: float
    history: list[Record]


def run_demo(
    out: Path, n: int = 64, seed: int = 0, overwrite: bool = False, budget: int | None = None
) -> tuple[Table, list[Outcome]]:
    """Train, test and draw; writes PNG, JSON and Markdown files to `out`.

    With a `budget` the trained tree is also tested, and drawn, with that many tokens per query.
    """
    task = CopyTask(n)
    check_budget(budget)
    started = time.perf_counter()
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise InputError(f"out: expected a new or empty folder, got {out} with files in it (--overwrite replaces them)")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    kinds = ("ca", "tca", "perceiver-io")  # Perceiver IO has as many latents as TCA reads tokens
    models = [make_recipe("copy", n=task.n, model=kind).make_model() for kind in kinds]
    outcomes: list[Outcome] = []
    train = replace(TRAIN, seed=seed)
    for name, model in zip(NAMES, models, strict=True):
        with Board([name]) as board:
            history = fit(model, task, train, watch=board.watcher())
        outcomes.append(tested(name, model, task, history))
        if isinstance(model, ReTreever):  # Perceiver IO trains as long as the tree did
            train, tree = replace(train, steps=history[-1].step), model
            if budget is not None:
                outcomes.append(tested(f"{name}, budget {budget}", model.set_reading(budget=budget), task, history))
    table = demo_table(task, outcomes, seed, time.perf_counter() - started)
    write_report(out, task, tree, table, outcomes, seed)
    return table, outcomes


def tested(name: str, model: Model, task: CopyTask, history: list[Record]) -> Outcome:
    """Accuracy, tokens and time of a trained model."""
    accuracy = evaluate(model, task, task.test())
    return Outcome(name, accuracy, model.tokens(task.context), query_microseconds(model, task), history)


@torch.inference_mode()
def query_microseconds(model: Model, task: CopyTask, repeats: int = 50) -> float:
    """Median time of answering all queries of one prepared context, per query."""
    model.eval()
    batch = task.sample(1, task.training(0))
    memory: Any = model.encode(batch.xc, batch.yc)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.answer(memory, batch.xt)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) / task.context


def write_report(out: Path, task: CopyTask, tree: ReTreever, table: Table, outcomes: list[Outcome], seed: int) -> None:
    """Write table, JSON, learning curves and the picture of one search."""
    curves = {o.name: as_rows(o.history, "accuracy") for o in outcomes if o.name in NAMES}  # a budget trains nothing
    draw_curves(curves, out / "curves.png", title=f"Copy task, N = {task.n}: validation accuracy in % while training")
    search = draw_search(out / "retrieval.png", tree, next(task.test(size=1)), title="Copy task: ")
    write_text(out / "retrieval.json", json.dumps(search.to_json(), indent=1) + "\n")
    result = {"table": table.to_json(), "history": curves, "seed": seed, "machine": machine()}
    write_text(out / "result.json", json.dumps(result, indent=1) + "\n")
    pictures = "![learning curves](curves.png)\n\n![one search, step by step](retrieval.png)\n"
    write_text(out / "README.md", table.to_markdown() + "\n" + pictures)


def demo_table(task: CopyTask, outcomes: list[Outcome], seed: int, seconds: float) -> Table:
    """Table of the results, one row per model."""
    rows = tuple(
        (
            o.name,
            f"{o.accuracy:.2f}",
            f"{o.tokens}",
            f"{100 * o.tokens / task.context:.1f}",
            f"{o.microseconds:.1f}",
            f"{o.history[-1].step:,}",
            f"{o.history[-1].seconds:.0f}",
        )
        for o in outcomes
    )
    return Table(
        title=f"Copy task, N = {task.n} ({task.context} context tokens, {task.test_sequences:,} test sequences)",
        columns=("model", "accuracy", "tokens", "tokens %", "us/query", "steps", "sec"),
        rows=rows,
        notes=(f"seed {seed}, {machine()['processor']}, {torch.get_num_threads()} threads, {seconds:.0f} s in all",),
    )
