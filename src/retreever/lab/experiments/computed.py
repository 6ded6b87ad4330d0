"""Rows that need no training: a random guess, and the exact posterior of a Gaussian process."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from retreever.lab.experiments.planned import PlannedRun
from retreever.models.random import RandomGuess
from retreever.tasks.copy import VOCABULARY
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
    tests = task.make_tests(data).items()
    tokens = None
    if run.computed == "random-guess":
        seed = run.recipe.train.seed
        guess = RandomGuess(dim_y=VOCABULARY, inputs="sequence", head="categorical", seed=seed)
        scores = {name: evaluate(guess, test, test.test()) for name, test in tests}
        tokens = 0
    else:  # the exact posterior
        scores = {name: float(test.oracle_scores().mean()) for name, test in tests}
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
