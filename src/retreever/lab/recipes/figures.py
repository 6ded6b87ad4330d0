"""Figures of a finished run, written to its folder: learning curves and predictions."""

from __future__ import annotations

import sys
from pathlib import Path

from retreever.batch import Batch
from retreever.errors import BackendError
from retreever.explanation import Explanation, explain
from retreever.lab.figures.activity import draw_activity
from retreever.lab.figures.gp import draw_gp
from retreever.lab.figures.images import draw_completions
from retreever.lab.figures.predictions import evaluating
from retreever.lab.figures.retrieval import draw_curves, draw_retrieval
from retreever.lab.recipes.recipe import Recipe
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.tasks.activity import ActivityTask
from retreever.tasks.copy import CopyTask
from retreever.tasks.gp import GPTask
from retreever.tasks.images import ImageTask
from retreever.train.protocols import Record, as_rows

IMAGES = 4
LARGEST_TREE = 64  # leaves of a tree that is drawn


def draw_run(folder: Path, recipe: Recipe, model: Model, task: object, history: list[Record]) -> None:
    """Draw learning curves and predictions on validation data; without matplotlib, print why not."""
    metric = recipe.task.metric
    curves = {recipe.name: as_rows(history, metric)}
    try:
        draw_curves(curves, folder / "curves.png", metric, title=f"{recipe.name}: validation {metric}")
        _draw_predictions(folder, model, task)
    except BackendError as error:
        print(f"no figures: {error}", file=sys.stderr)


def _draw_predictions(folder: Path, model: Model, task: object) -> None:
    file = folder / "predictions.png"
    if isinstance(task, GPTask):
        draw_gp(model, task, file)
    elif isinstance(task, ImageTask):
        draw_completions(model, task.split[1][:IMAGES], file)
    elif isinstance(task, ActivityTask):
        batch = next(iter(task.validation()))
        changes = (batch.yt.diff(dim=1) != 0).sum(dim=1)
        draw_activity(model, batch, file, window=int(changes.argmax()))  # the window with most changes
    elif isinstance(task, CopyTask) and isinstance(model, ReTreever) and task.context <= LARGEST_TREE:
        draw_search(folder / "retrieval.png", model, next(task.validation(sequences=1)))


def draw_search(file: Path, model: ReTreever, batch: Batch, title: str = "", budget: int | None = None) -> Explanation:
    """Draw and return the search of one query of a sequence of the copy task for the token it has to repeat.

    `budget` is the number of tokens the query may read; None takes that of the model.
    """
    with evaluating(model) as device:
        batch = batch.to(device)
        found = model.search(model.encode(batch.xc, batch.yc), batch.xt, budget=budget)
    context = batch.xc.shape[1]
    query = context // 3
    answer = context - 1 - query  # target j is at context position n/2 - 1 - j
    search = explain(found, query=query)
    draw_retrieval(search, file, truth=answer, title=f"{title}query {query} looks for token {answer}")
    return search
