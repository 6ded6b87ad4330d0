"""Tiny runs to be spoilt, made by training for a moment, and the command line, whose errors must be one line."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from runner import BrokenPromiseError, check_message

from retreever import cli
from retreever.lab.recipes.recipe import make_recipe
from retreever.tasks.copy import CopyTask
from retreever.train.engine import Trainer
from retreever.train.run import RunFolder
from retreever.train.together import train_in

SETTINGS: dict[str, Any] = {
    "n": 8, "steps": 12, "batch": 2, "warmup": 2, "evaluate_every": 4, "save_every": 3, "dim": 8, "hidden": 8,
}  # fmt: skip
RECIPE = make_recipe("copy", quick=True, **SETTINGS)
RUN = RECIPE.name


class ShortTask(CopyTask):
    """The copy task with one batch of validation."""

    def validation(self) -> Any:
        yield self.sample(2, torch.Generator().manual_seed(0))


def a_trainer() -> Trainer:
    torch.manual_seed(7)
    return Trainer(RECIPE.make_model(), ShortTask(8), RECIPE.train)


def finished_run(base: Path) -> Path:
    """The folder of a run trained to its end."""
    folder = RunFolder(base / RUN)
    folder.start(RECIPE.to_json(), resume=False, overwrite=False)
    trainer = a_trainer()
    train_in(folder, trainer)
    result: dict[str, Any] = dict.fromkeys(("steps", "tokens", "context", "parameters"), 4)
    result |= {"test": 1.0, "scores": {"test": 1.0}, "validation": 1.0, "metric": "accuracy in %", "seconds": 0.1}
    folder.finish(result | {"hardware": "CPU", "versions": {"retreever": "0"}})
    return folder.path


def command(*words: str) -> str | None:
    """Run the command line; its errors must be one line."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        status = cli.main(list(words))
    lines, errors = (stream.buffer.getvalue().decode().split("\n")[:-1] for stream in streams if not stream.flush())
    for line in lines:
        if not line.isprintable():
            raise BrokenPromiseError(f"expected printable lines, got {line[:300]!r}")
    if status == 0:
        return None
    if status != 2 or len(errors) != 1 or not errors[0].startswith("retreever: "):
        raise BrokenPromiseError(f"status {status}, {len(errors)} lines: {str(errors)[:300]}")
    check_message(errors[0].removeprefix("retreever: "))
    return "exit 2"
