"""Training with a run folder: checkpoints as it goes, and goes on from the newest one to the same bits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch import nn

from retreever.errors import CheckpointError
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from retreever.train.engine import Trainer
from retreever.train.protocols import Record
from retreever.train.run import RunFolder
from retreever.train.state import (
    Streams,
    model_tensors,
    optimiser_tensors,
    random_tensors,
    restore_model,
    restore_optimiser,
    restore_random,
)


def save(folder: RunFolder, trainer: Trainer, name: str | None = None) -> Path:
    """Everything the run is, as a checkpoint; named ones (the best) stand beside the numbered."""
    model = _module(trainer)
    tensors = {
        **model_tensors(model),
        **optimiser_tensors(model, trainer.optimiser),
        **random_tensors(_streams(trainer)),
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
    try:
        tensors, state = load_checkpoint(newest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; without {newest} the run goes on from an earlier one") from None
    model = _module(trainer)
    restore_model(model, tensors, newest)
    restore_optimiser(model, trainer.optimiser, tensors)
    try:
        restore_random(_streams(trainer), tensors)
        trainer.restart(int(state["step"]), float(state["seconds"]), [Record(**row) for row in state["history"]])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{newest}: expected a checkpoint of a training run, got {error}") from None
    if trainer.ranks.first:
        folder.keep_metrics(len(trainer.history))


def record(folder: RunFolder, trainer: Trainer) -> None:
    """Write down what validation said, and keep the weights if they are the best so far."""
    latest = trainer.history[-1]
    folder.add_metrics(asdict(latest))
    if all(latest.metric > earlier.metric for earlier in trainer.history[:-1]):
        save(folder, trainer, name="best")


def _streams(trainer: Trainer) -> Streams:
    return {"data": trainer.stream, "paths": trainer.paths, "sizes": trainer.sizing, "dropout": trainer.dropout}


def _module(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model
