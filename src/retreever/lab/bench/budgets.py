"""`retreever bench budgets`: score against tokens read, from one path to all leaves, with the same weights.

A budget is a number of tokens, the same for all contexts of a task; "2x" is twice the tokens of one path over the
largest context. A shorter context reads fewer: its own path at least, and never more tokens than it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retreever.arguments import check_int, check_number, reject
from retreever.batch import Batch, without_padding
from retreever.errors import BackendError, DataError
from retreever.lab.bench.budget_tables import ALL, PATH, budget_table, draw_budgets, drops
from retreever.lab.bench.options_models import BudgetsBench
from retreever.lab.bench.report import Row, Rows, Run
from retreever.lab.bench.rivals.models import shortened
from retreever.lab.experiments.collect import GENERATED
from retreever.lab.experiments.results import Entry, load_results
from retreever.lab.recipes.command import load_run
from retreever.lab.recipes.recipe import Recipe, make_recipe, recipe_from_json
from retreever.models.retreever import ReTreever
from retreever.pretrained.card import read_card
from retreever.pretrained.load import load_weights
from retreever.results import Retrieval
from retreever.train.log import counted
from retreever.train.run import read_json
from retreever.train.score import batch_means
from retreever.tree.plan import TreePlan


class Weights(NamedTuple):
    """Trained weights to measure."""

    name: str
    recipe: Recipe
    model: ReTreever
    data: str | None


class Reading(NamedTuple):
    """A way to read a tree."""

    name: str
    retrieval: Retrieval
    budget: int | None


def measure(options: BudgetsBench) -> None:
    """Run the benchmark and write its files. All is in float32, as in `retreever eval`."""
    check_int("batches", options.batches, 0)
    for factor in options.factors:
        check_number("factors", factor, 1.0)
    results = load_results(options.experiments)
    runs = list(_run_weights(options, results))  # first of all, so that a wrong folder is reported at once
    overwrite = options.overwrite or options.add
    run = Run.start("budgets", replace(options, dtype="float32", runs=(), overwrite=overwrite))
    rows: Rows = []
    left_out: dict[str, str] = {}
    for weights in (*map(_shipped, options.models), *runs):
        try:
            rows += weights_rows(run, options, weights, results)
        except (DataError, BackendError) as error:
            left_out[weights.name] = str(error)
            print(f"{weights.name}: left out: {error}", file=sys.stderr)
    if options.add and run.file("json").exists():
        measured = {row["weights"] for row in rows}
        rows = [row for row in read_json(run.file("json"))["rows"] if row["weights"] not in measured] + rows
    if not rows:
        reject("models", "weights whose data are there", "; ".join(left_out.values()) or "none")
    summary = {"drops": drops(rows), "left_out": left_out}
    run.publish(rows, [budget_table(rows)], partial(draw_budgets, rows), summary)


def weights_rows(run: Run, options: BudgetsBench, weights: Weights, results: Mapping[str, Entry]) -> Rows:
    """Rows of all tests of some weights, a row for every reading."""
    recipe, model = weights.recipe, weights.model.to(run.device)
    most = 3 if options.quick else options.batches
    readings = make_readings(TreePlan(recipe.task.context, model.config.branch).tokens, options.factors)
    rows: Rows = []
    for test, task in recipe.task.make_tests(options.data).items():
        total = min(most or task.test_batches, task.test_batches)
        batches = counted(islice(shortened(task, total).test(), total), f"{weights.name}, {test}", total)
        where = {
            "weights": weights.name, "test": test, "metric": recipe.task.metric, "seed": recipe.train.seed,
            "data": weights.data, "hardware": run.machine["accelerator"] or run.machine["processor"],
            "batches": total, **all_tokens_score(recipe, test, results if total == task.test_batches else {}),
        }  # fmt: skip
        found = [{**where, **row} for row in score_rows(model, task, batches, readings, run.device)]
        shown = ", ".join(f"{row['reading']} {row['score']:.4f} ({row['tokens']:.2f})" for row in found)
        print(f"{weights.name}, {test}: {shown}", file=sys.stderr, flush=True)
        rows += found
    return rows


def make_readings(path: int, factors: Sequence[float]) -> list[Reading]:
    """One path, budgets of `factors` times its `path` tokens, and all leaves."""
    budgets = [Reading(f"{factor:g}x", "policy", int(factor * path)) for factor in sorted(factors)]
    return [Reading(PATH, "policy", None), *budgets, Reading(ALL, "full", None)]


def score_rows(
    model: ReTreever, task: Any, batches: Iterator[Batch], readings: Sequence[Reading], device: torch.device
) -> Rows:
    """Score and tokens read of every reading: means over batches, as in `evaluate`; contexts are encoded once."""

    def read(batch: Batch) -> list[Tensor]:
        memory = model.encode(batch.xc, batch.yc, batch.context_mask)
        targets = without_padding(batch.xt, batch.target_mask)
        values = []
        for _, retrieval, budget in readings:
            found = model.set_reading(retrieval, budget).search(memory, targets)
            values += [task.metric(model.head(found.output), batch), found.tokens_read]
        return values

    means = batch_means(model, read, batches, device).cpu()
    rows = []
    for reading, scores, tokens in zip(readings, means[::2], means[1::2], strict=True):
        std = float(scores.std()) if len(scores) > 1 else None
        row: Row = {"reading": reading.name, "budget": reading.budget, "tokens": round(float(tokens.mean()), 3)}
        rows.append({**row, "n": round(float(means[-1].mean()), 3), "score": float(scores.mean()), "std": std})
    return rows


def all_tokens_score(recipe: Recipe, test: str, results: Mapping[str, Entry]) -> Row:
    """Score of the same task with cross attention over all tokens (Transformer + CA), over the seeds in `results`.

    Only a score on the whole test can be compared with it.
    """
    stem = _without_seed(replace(make_recipe(recipe.task.name, model=recipe.task.models[1]), task=recipe.task).name)
    found = [entry["scores"][test] for name, entry in results.items() if _without_seed(name) == stem]
    std = stdev(found) if len(found) > 1 else None
    return {"all_tokens": mean(found) if found else None, "all_tokens_std": std, "all_tokens_seeds": len(found)}


def _without_seed(name: str) -> str:
    return name.rpartition("-seed")[0]


def _shipped(name: str) -> Weights:
    card = read_card(name)
    model: Any = load_weights(card)
    return Weights(name, recipe_from_json(card.settings), model, card.data)


def _run_weights(options: BudgetsBench, results: Mapping[str, Entry]) -> Iterator[Weights]:
    for path in options.runs:
        recipe, model, _ = load_run(path, options.checkpoint)
        if not isinstance(model, ReTreever):
            reject("runs", "runs of models that search a tree", f"{path} of {recipe.model.model}")
        generated = "generated" if recipe.task.name in GENERATED else None
        yield Weights(path.resolve().name, recipe, model, results.get(recipe.name, {}).get("data") or generated)
