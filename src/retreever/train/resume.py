"""Training with a run folder: checkpoints as it goes, stops cleanly on a signal, and goes on where it was."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from retreever.errors import CheckpointError, RetreeverError
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from retreever.train.engine import Record, Trainer, Watcher
from retreever.train.run import RunFolder
from retreever.train.state import (
    model_tensors,
    optimiser_tensors,
    random_tensors,
    restore_model,
    restore_optimiser,
    restore_random,
)


class Stopped(RetreeverError):
    """A signal asked the run to stop; its last step is saved."""


def train_in(folder: RunFolder, trainer: Trainer, watch: Watcher | None = None) -> list[Record]:
    """Train to the end, from the newest checkpoint in `folder` if there is one, leaving files as it goes."""
    resume_from(folder, trainer)
    with _signals() as asked:
        while not trainer.done:
            records = len(trainer.history)
            progress = trainer.advance()
            if len(trainer.history) > records and trainer.ranks.first:
                _record(folder, trainer)
            if watch is not None:
                watch(progress)
            stop = asked[:1]  # a signal that comes during the save is seen after the next step
            due = stop or trainer.done or trainer.step % trainer.config.save_every == 0
            if due and trainer.ranks.first:
                save(folder, trainer)
            if stop and not trainer.done:
                raise Stopped(f"stopped by {stop[0]} after step {trainer.step}; {folder.path} can be resumed")
    return trainer.history


def save(folder: RunFolder, trainer: Trainer, name: str | None = None) -> Path:
    """Everything the run is, as a checkpoint; named ones (the best) stand beside the numbered."""
    model = _module(trainer)
    tensors = {
        **model_tensors(model),
        **optimiser_tensors(model, trainer.optimiser),
        **random_tensors(_streams(trainer), trainer.device),
    }
    state = {
        "step": trainer.step,
        "seconds": trainer.seconds,
        "history": [asdict(record) for record in trainer.history],
    }
    return save_checkpoint(folder.checkpoints, trainer.step, tensors, state, keep=trainer.config.keep, name=name)


def resume_from(folder: RunFolder, trainer: Trainer) -> None:
    """Put the newest checkpoint of `folder` back into `trainer`, and cut the metrics written after it."""
    newest = latest_checkpoint(folder.checkpoints)
    if newest is None:
        if trainer.ranks.first:
            folder.keep_metrics(0)
        return
    tensors, state = load_checkpoint(newest)
    model = _module(trainer)
    restore_model(model, tensors, newest)
    restore_optimiser(model, trainer.optimiser, tensors)
    try:
        restore_random(_streams(trainer), tensors, trainer.device)
        trainer.step, trainer.seconds = int(state["step"]), float(state["seconds"])
        trainer.history = [Record(**row) for row in state["history"]]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{newest}: expected a checkpoint of a training run, got {error}") from None
    if trainer.ranks.first:
        folder.keep_metrics(len(trainer.history))


def _record(folder: RunFolder, trainer: Trainer) -> None:
    """Write down what validation said, and keep the weights if they are the best so far."""
    latest = trainer.history[-1]
    folder.add_metrics(asdict(latest))
    if all(latest.metric > earlier.metric for earlier in trainer.history[:-1]):
        save(folder, trainer, name="best")


def _streams(trainer: Trainer) -> dict[str, torch.Generator]:
    return {"data": trainer.stream, "paths": trainer.paths}


def _module(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model


@contextmanager
def _signals() -> Iterator[list[str]]:
    """The names of signals that asked for an end so far; the second one ends at once."""
    asked: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    kinds = (signal.SIGINT, signal.SIGTERM)
    before: dict[Any, Any] = {}
    try:
        for kind in kinds:
            before[kind] = signal.signal(kind, note)
    except ValueError:  # not in the main thread: signals are somebody else's business
        before.clear()
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
