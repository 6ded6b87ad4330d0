"""Rows that need no training: a random guess, and the exact posterior of a Gaussian process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from retreever.lab.experiments.planned import PlannedRun
from retreever.models.random import RandomGuess
from retreever.tasks.copy import VOCABULARY
from retreever.tasks.gp import GPTask
from retreever.train.run import RunFolder
from retreever.train.score import evaluate
from retreever.version import __version__


def compute(run: PlannedRun, out: Path, data: Path | None, overwrite: bool = False) -> None:
    """Score a run without training and write a run folder, as training does; one with a result is kept."""
    folder, task = RunFolder(out / run.name), run.recipe.task
    started = time.perf_counter()
    folder.start(run.config(), resume=not overwrite, overwrite=overwrite)
    if folder.result.exists():
        return
    score, tokens = {"random-guess": (_random_guess, 0), "exact-posterior": (_exact_posterior, None)}[run.computed]
    scores = {name: score(test, run.recipe.train.seed) for name, test in task.make_tests(data).items()}
    result = {
        "test": next(iter(scores.values())),
        "scores": scores,
        "metric": task.metric,
        "steps": 0,
        "seconds": round(time.perf_counter() - started, 2),
        "tokens": tokens,
        "context": task.context,
        "hardware": "CPU",
        "versions": {"retreever": __version__, "torch": torch.__version__},
    }
    folder.finish(result)


def _random_guess(task: Any, seed: int) -> float:
    model = RandomGuess(dim_y=VOCABULARY, inputs="sequence", head="categorical", seed=seed)
    return evaluate(model, task, task.test())


def _exact_posterior(task: Any, seed: int) -> float:
    assert isinstance(task, GPTask)  # recipe files are checked for this
    return task.oracle_score()
