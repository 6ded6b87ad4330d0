"""`fit`: train a model on one's own data in one call."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import nn

from retreever.arguments import check_bool, check_choice, check_path, reject
from retreever.models.base import Model as OwnModel
from retreever.scaler import Scaled
from retreever.train.checkpoint import load_checkpoint
from retreever.train.config import TrainConfig
from retreever.train.engine import Trainer
from retreever.train.feed import Metric, as_task
from retreever.train.log import Board
from retreever.train.protocols import Model, Progress, Record, Task, Watcher
from retreever.train.run import RunFolder
from retreever.train.state import restore_model
from retreever.train.together import Run, train_together

Keep = Literal["best", "last"]


def fit(
    model: Model,
    data: Task | Iterable[Any],
    config: TrainConfig | None = None,
    *,
    validation: Iterable[Any] | None = None,
    metric: Metric | None = None,
    device: str = "cpu",
    keep: Keep = "best",
    folder: str | Path | None = None,
    progress: bool | None = None,
    watch: Watcher | None = None,
) -> list[Record]:
    """Train `model` in place and return its validation history; it ends in the mode, training or not, it came in.

    Args:
        model: of this library, or any module with `loss` and `predict`.
        data: a task, or batches: a DataLoader (`collate_fn=collate` for rows of different sizes), a list, any iterable
            of `Batch` or of tuples (xc, yc, xt, yt). Batches are taken in turn, again from the start at the end.
        config: steps, learning rate and the rest; with batches `config.batch` has no meaning.
        validation: batches to steer by, where `data` is no task.
        metric: (prediction, batch) -> one value per query, higher is better; the log-likelihood unless given.
        device: where to train; the model stays there.
        keep: "best" leaves the weights that did best on validation, "last" those of the last step. Without validation
            they are the last.
        folder: keep checkpoints there; the same call goes on from the newest one after an interruption. A run of other
            settings or of another model is refused; the data are not compared.
        progress: show a bar with the running mean of the loss; None does so on a terminal.
        watch: called with every step's progress.
    """
    check_choice("keep", keep, ("best", "last"))
    if folder is not None:
        check_path("folder", folder)
    if progress is not None:
        check_bool("progress", progress)
    if watch is not None and not callable(watch):
        reject("watch", "a function of a step's progress", type(watch).__name__)
    task = as_task(data, validation, metric)
    was_training = getattr(model, "training", True)
    trainer = Trainer(model, task, config or TrainConfig(), device)
    quiet = not (sys.stderr.isatty() if progress is None else progress)
    try:
        with Board(["fit"], "validation", quiet=quiet) as board:
            watchers = [board.watcher(), *([] if watch is None else [watch])]
            if folder is None:
                _train(trainer, watchers, keep)
            else:
                _train_in(RunFolder(Path(folder), "folder"), trainer, watchers, keep)
    finally:
        model.train(was_training)
    return trainer.history


def _train(trainer: Trainer, watchers: list[Watcher], keep: Keep) -> None:
    """In memory alone."""
    assert isinstance(trainer.model, nn.Module)
    best: dict[str, Any] | None = None
    seen = 0
    while not trainer.done:
        progress: Progress = trainer.advance()
        if keep == "best" and len(trainer.history) > seen:
            seen = len(trainer.history)
            if _is_best(trainer.history):
                best = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
        for watch in watchers:
            watch(progress)
    if best is not None:
        trainer.model.load_state_dict(best)


def _is_best(history: list[Record]) -> bool:
    """Whether the newest record is better than all before it."""
    return history[-1].metric > max((record.metric for record in history[:-1]), default=-float("inf"))


def _train_in(folder: RunFolder, trainer: Trainer, watchers: list[Watcher], keep: Keep) -> None:
    """With checkpoints, from the newest one that is there."""
    assert isinstance(trainer.model, nn.Module)
    described = _described(trainer.model)
    settings = {**asdict(trainer.config), "model": described}
    folder.start(settings, resume=True, overwrite=False, translate=lambda saved: {"model": described} | saved)
    train_together([Run(folder, trainer, watchers)])
    best = folder.checkpoints / "best"
    if keep == "best" and trainer.history and best.exists():
        restore_model(trainer.model, load_checkpoint(best)[0], best)


def _described(model: Model) -> dict[str, Any]:
    """What a run folder has to know of a model, kernels aside: another one does not go on with its weights."""
    inner = model.model if isinstance(model, Scaled) else model
    settings = asdict(inner.config) if isinstance(inner, OwnModel) else {}
    return {"kind": type(inner).__name__, **{name: value for name, value in settings.items() if name != "impl"}}
