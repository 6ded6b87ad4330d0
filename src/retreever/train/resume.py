"""Training with a run folder: checkpoints as it goes, and goes on from the newest one to the same bits."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from retreever.errors import CheckpointError
from retreever.objective import Loss
from retreever.train.checkpoint import (
    check_fits,
    latest_checkpoint,
    load_checkpoint,
    refuse,
    save_checkpoint,
    tidy_checkpoints,
)
from retreever.train.engine import Trainer
from retreever.train.protocols import Positioned, Record
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


def save(folder: RunFolder, trainer: Trainer, name: str | None = None) -> None:
    """Everything the run is, as a checkpoint; named ones (the best) stand beside the numbered.

    To be called in all processes of a run: each has a stream of dropout of its own. The first one writes.
    """
    tensors = _tensors(trainer)
    if not trainer.ranks.first:
        return
    state = {
        "run": folder.name(),
        "settings": _settings(trainer),
        "processes": trainer.ranks.world,
        "threads": torch.get_num_threads(),
        "device": trainer.device.type,
        "step": trainer.step,
        "seconds": trainer.seconds,
        "history": [asdict(record) for record in trainer.history],
    }
    if isinstance(trainer.task, Positioned):
        state["position"] = list(trainer.task.position)
    save_checkpoint(folder.checkpoints, trainer.step, tensors, state, keep=trainer.config.keep, name=name)


def resume_from(folder: RunFolder, trainer: Trainer) -> None:
    """Put the newest checkpoint of `folder` back into `trainer`; metrics are those of its history."""
    newest = latest_checkpoint(folder.checkpoints)
    if newest is not None:
        try:
            tensors, state = load_checkpoint(newest)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; without {newest} the run goes on from an earlier one") from None
        file = newest / "state.json"
        check_belongs(file, state, folder, trainer)
        history = check_progress(file, state, trainer)
        position = _position(file, state)
        _restore(trainer, tensors, newest)
        if isinstance(trainer.task, Positioned):
            trainer.task.position = position
        trainer.restart(state["step"], float(state["seconds"]), history)
    trainer.ranks.wait()  # all have read before the first cleans up what a killed process left
    if not trainer.ranks.first:
        return
    tidy_checkpoints(folder.checkpoints, trainer.config.keep)
    if trainer.history or folder.metrics.exists():
        folder.write_metrics(trainer.history)


def record(folder: RunFolder, trainer: Trainer) -> None:
    """Write down the newest validation score, and keep the weights if they are the best so far."""
    if trainer.ranks.first:
        folder.write_metrics(trainer.history)
    latest = trainer.history[-1]
    if all(latest.metric > earlier.metric for earlier in trainer.history[:-1]):
        save(folder, trainer, name="best")


def check_belongs(file: Path, state: dict[str, Any], folder: RunFolder, trainer: Trainer) -> None:
    """A checkpoint belongs to the run whose folder it lies in, to its settings and its number of processes."""
    run, name = state.get("run"), folder.name()
    if name and run != name:
        refuse(f"{file}: run", f"that of this folder, {name}", repr(run))
    settings, wanted = state.get("settings"), _settings(trainer)
    if not isinstance(settings, dict):
        refuse(f"{file}: settings", "a JSON object", type(settings).__name__)
    for key in wanted | settings:
        if (ours := wanted.get(key)) != (theirs := settings.get(key)):
            refuse(f"{file}: settings.{key}", repr(ours), repr(theirs))
    if (processes := state.get("processes")) != trainer.ranks.world:
        refuse(f"{file}: processes", f"{trainer.ranks.world}, as many as there are now", repr(processes))
    device, here = state.get("device"), trainer.device.type
    if device not in (None, here):  # the first versions did not say
        refuse(f"{file}: device", f"{here}, as random numbers of other devices cannot be continued", repr(device))
    threads = state.get("threads")
    if not _is_count(threads) or not threads:
        refuse(f"{file}: threads", "an int > 0", repr(threads))
    if trainer.ranks.first and threads != torch.get_num_threads():
        now = torch.get_num_threads()
        warnings.warn(
            f"{file}: saved with {threads} threads, resumed with {now}: sums are rounded differently, so the"
            " weights will not have the bits of a run that never stopped",
            stacklevel=2,
        )


def check_progress(file: Path, state: dict[str, Any], trainer: Trainer) -> list[Record]:
    """Step, time and history of a checkpoint must agree with its name and with the settings; returns the history."""
    config, step = trainer.config, state.get("step")
    if not _is_count(step) or file.parent.name != f"step-{step:09d}":
        refuse(f"{file}: step", f"that of {file.parent.name}", repr(step))
    if step > config.steps:
        refuse(f"{file}: step", f"at most the {config.steps} steps of the run", step)
    seconds = state.get("seconds")
    if not _is_number(seconds) or not 0 <= seconds < math.inf:
        refuse(f"{file}: seconds", "a finite number >= 0", repr(seconds))
    rows = state.get("history")
    if not isinstance(rows, list):
        refuse(f"{file}: history", "a list", type(rows).__name__)
    history = [_record(f"{file}: history[{index}]", row) for index, row in enumerate(rows)]
    looks = {*range(config.evaluate_every, step + 1, config.evaluate_every)}
    looks |= {config.steps} if step == config.steps else set()
    looks = looks if getattr(trainer.task, "validates", True) else set()
    if [entry.step for entry in history] != sorted(looks):
        refuse(f"{file}: history", f"one entry for each of {len(looks)} looks at validation", f"{len(rows)} others")
    return history


def _position(file: Path, state: dict[str, Any]) -> tuple[int, int]:
    """Where the batches of a `Feed` go on."""
    match state.get("position", [0, 0]):
        case [done, taken] if _is_count(done) and _is_count(taken):
            return done, taken
        case other:
            refuse(f"{file}: position", "passes and batches, two ints >= 0", repr(other))


def _record(where: str, row: Any) -> Record:
    """An entry of the history, its types checked."""
    wanted = {"step", "metric", "loss", "seconds", "terms"}
    if not isinstance(row, dict) or row.keys() != wanted:
        refuse(where, f"an object of {', '.join(sorted(wanted))}", repr(row))
    terms = row["terms"]
    if not isinstance(terms, dict) or terms.keys() != set(Loss._fields):
        refuse(f"{where}.terms", f"an object of {', '.join(Loss._fields)}", repr(terms))
    numbers = {key: row[key] for key in ("metric", "loss", "seconds")} | {f"terms.{k}": v for k, v in terms.items()}
    for key, value in numbers.items():
        if not _is_number(value):
            refuse(f"{where}.{key}", "a number", repr(value))
    if not _is_count(row["step"]):
        refuse(f"{where}.step", "an int >= 0", repr(row["step"]))
    return Record(**row)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 10**9


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or _is_count(value)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """The training settings that decide the weights, as JSON gives them back."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(trainer.config)))
    return {key: value for key, value in settings.items() if key not in ("keep", "save_every")}


def _restore(trainer: Trainer, tensors: dict[str, Tensor], source: Path) -> None:
    """All tensors back into `trainer`, after all of them are known to fit."""
    model = _module(trainer)
    check_fits(source, tensors, _tensors(trainer))
    restore_model(model, tensors, source)
    restore_optimiser(model, trainer.optimiser, tensors)
    mine = tensors["random.dropout"][trainer.ranks.rank]
    restore_random(_streams(trainer), tensors | {"random.dropout": mine}, source)


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors of a checkpoint; the states of dropout have a row for each process."""
    model, random = _module(trainer), random_tensors(_streams(trainer))
    random["random.dropout"] = trainer.ranks.gather(random["random.dropout"], trainer.device)
    return {**model_tensors(model), **optimiser_tensors(model, trainer.optimiser), **random}


def _streams(trainer: Trainer) -> Streams:
    return {"data": trainer.stream, "paths": trainer.paths, "sizes": trainer.sizing, "dropout": trainer.dropout}


def _module(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model
