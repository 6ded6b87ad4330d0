"""A checkpoint is believed only where it agrees with itself, its run and its settings; all else is one line."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever.errors import CheckpointError
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.tasks.copy import CopyTask
from retreever.train.checkpoint import load_checkpoint, save_checkpoint
from retreever.train.engine import Trainer
from retreever.train.resume import resume_from, save
from retreever.train.run import RunFolder
from retreever.train.together import train_in

RECIPE = make_recipe("copy", n=8, steps=12, batch=2, warmup=2, evaluate_every=4, save_every=3, dropout=0.1)
WEIGHT = "optimiser.attention.block.to_q.weight"
Tensors = dict[str, Tensor]


def a_trainer(recipe: Recipe = RECIPE) -> Trainer:
    torch.manual_seed(7)
    return Trainer(recipe.make_model(), CopyTask(8), recipe.train)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after step 6."""
    folder = RunFolder(tmp_path_factory.mktemp("trained"))
    trainer = a_trainer()
    while trainer.step < 6:
        trainer.advance()
    save(folder, trainer)
    return folder.path


def tampered(trained: Path, tmp_path: Path, change: Callable[[Tensors, dict[str, Any]], object]) -> RunFolder:
    """The run with its newest checkpoint changed, manifest and hashes in order."""
    tensors, state = load_checkpoint(trained / "checkpoints" / "step-000000006")
    change(tensors, state)
    save_checkpoint(tmp_path / "checkpoints", 6, tensors, state)
    return RunFolder(tmp_path)


def drop(prefix: str) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, _: Any) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, _: Any) -> None:
        tensors[name] = make(tensors.get(name, torch.zeros(1)))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(f"{WEIGHT}.exp_avg", lambda _: torch.zeros(1)), rf"{WEIGHT}.exp_avg: expected float32 \(64, 64\), got"),
        (put(f"{WEIGHT}.exp_avg", lambda t: t.double()), rf"{WEIGHT}.exp_avg: expected float32 .*, got float64"),
        (put(f"{WEIGHT}.step", lambda _: torch.zeros(2)), rf"{WEIGHT}.step: expected float32 \(\), got"),
        (put(f"{WEIGHT}.third", lambda _: torch.zeros(1)), rf"{WEIGHT}.third: expected no such tensor, got float32"),
        (put("something", lambda _: torch.zeros(1)), r"something: expected no such tensor, got float32"),
        (drop(f"{WEIGHT}.exp_avg_sq"), rf"{WEIGHT}.exp_avg_sq: expected .*, got no such tensor$"),
        (drop("optimiser."), r"optimiser\.\S+: expected .*, got no such tensor \(and \d+ more\)$"),
        (drop("random.paths"), r"random.paths: expected uint8 .*, got no such tensor$"),
        (put("random.data", lambda t: t[:-1]), r"random.data: expected uint8 .*, got uint8"),
        (put("random.data", torch.zeros_like), r"random.data: expected the state of a random generator, got"),
        (put("random.dropout", lambda t: t.repeat(2, 1)), r"random.dropout: expected uint8 \(1, \d+\), got uint8 \(2,"),
    ],
)
def test_crafted_tensors_are_refused_by_name(
    change: Callable[[Tensors, Any], None], message: str, trained: Path, tmp_path: Path
) -> None:
    folder = tampered(trained, tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"step-000000006: {message}"):
        resume_from(folder, a_trainer())


def entry(key: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, state: state.__setitem__(key, value)


def without(key: str) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, state: state.__delitem__(key)


def look(key: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, state: state["history"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[(entry("step", value), "step: expected that of step-000000006, got") for value in (
            9, 12, 10**30, -6, math.inf, math.nan, 6.0, "6", True, None, [6])],
        (without("step"), "step: expected that of step-000000006, got None"),
        *[(entry("seconds", value), "seconds: expected a finite number >= 0, got") for value in (
            -1.0, math.inf, math.nan, "1", None, True)],
        (entry("history", {}), "history: expected a list, got dict"),
        (entry("history", []), "history: expected one entry for each of 1 looks at validation, got 0 others"),
        (entry("history", [1]), r"history\[0\]: expected an object of loss, metric, seconds, step, terms, got 1"),
        (look("step", 5), "history: expected one entry for each"),
        (look("step", 4.0), r"history\[0\].step: expected an int >= 0, got 4.0"),
        (look("metric", "good"), r"history\[0\].metric: expected a number, got 'good'"),
        (look("terms", {"total": 1.0}), r"history\[0\].terms: expected an object of total, task"),
        (look("extra", 1), r"history\[0\]: expected an object of"),
        (entry("settings", None), "settings: expected a JSON object, got NoneType"),
        (without("processes"), "processes: expected 1, as many as there are now, got None"),
        (entry("processes", 2), "processes: expected 1, as many as there are now, got 2"),
        (entry("threads", 0), "threads: expected an int > 0, got 0"),
        (entry("device", "cuda"), "device: expected cpu, as random numbers of other devices cannot be continued, got"),
    ],
)  # fmt: skip
def test_state_that_contradicts_the_run_is_refused_by_name(
    change: Callable[[Any, dict[str, Any]], None], message: str, trained: Path, tmp_path: Path
) -> None:
    trainer = a_trainer()
    with pytest.raises(CheckpointError, match=rf"step-000000006/state\.json: {message}"):
        resume_from(tampered(trained, tmp_path, change), trainer)
    assert trainer.step == 0  # nothing was put back


def test_a_step_beyond_the_last_one_is_refused(trained: Path, tmp_path: Path) -> None:
    tensors, state = load_checkpoint(trained / "checkpoints" / "step-000000006")
    save_checkpoint(tmp_path / "checkpoints", 13, tensors, state | {"step": 13})
    with pytest.raises(CheckpointError, match="step: expected at most the 12 steps of the run, got 13"):
        resume_from(RunFolder(tmp_path), a_trainer())


def test_a_checkpoint_of_other_settings_is_refused(trained: Path) -> None:
    with pytest.raises(CheckpointError, match=r"settings\.seed: expected 1, got 0$"):
        resume_from(RunFolder(trained), a_trainer(RECIPE.changed(seed=1)))


def test_a_checkpoint_of_another_run_with_the_same_settings_is_refused(tmp_path: Path) -> None:
    ours, other = RunFolder(tmp_path / "ours"), RunFolder(tmp_path / "other")
    for folder in (ours, other):
        folder.start(RECIPE.to_json(), resume=False, overwrite=False)
        save(folder, a_trainer())
    assert ours.name() != other.name()
    resume_from(ours, a_trainer())
    shutil.rmtree(ours.checkpoints)
    shutil.copytree(other.checkpoints, ours.checkpoints)
    with pytest.raises(CheckpointError, match=f"run: expected that of this folder, {ours.name()}, got"):
        resume_from(ours, a_trainer())


def test_a_run_copied_as_a_whole_can_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(RECIPE.to_json(), resume=False, overwrite=False)
    save(folder, a_trainer())
    shutil.copytree(folder.path, tmp_path / "copy")
    resume_from(RunFolder(tmp_path / "copy"), a_trainer())


def test_another_number_of_threads_is_mentioned(trained: Path, tmp_path: Path) -> None:
    folder = tampered(trained, tmp_path, entry("threads", 77))
    with pytest.warns(UserWarning, match=r"saved with 77 threads, resumed with \d+: .* not have the bits"):
        resume_from(folder, a_trainer())


def test_metrics_are_rebuilt_from_the_history(tmp_path: Path) -> None:
    """Whatever a killed process or an editor left there, half a line in another encoding too."""
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    for folder in (whole, broken):
        train_in(folder, a_trainer())
    expected = broken.metrics.read_bytes()
    broken.metrics.write_bytes(b'{"step": 4, "met\xff\xfe{"step"')
    train_in(broken, a_trainer())
    assert broken.metrics.read_bytes() == expected
    assert [name for name in os.listdir(broken.path) if name.startswith(".")] == []


def test_a_state_that_is_too_large_is_not_read(trained: Path, tmp_path: Path) -> None:
    folder = tampered(trained, tmp_path, lambda *_: None)
    file = folder.checkpoints / "step-000000006" / "state.json"
    os.truncate(file, 60 * 2**30)  # sparse: it takes no room on the disk
    manifest = file.with_name("manifest.json")
    size = load_size(manifest)
    with pytest.raises(CheckpointError, match=rf"state\.json: expected {size} bytes, got {60 * 2**30}"):
        resume_from(folder, a_trainer())
    manifest.write_text(manifest.read_text().replace(f'"size": {size}', f'"size": {60 * 2**30}'))
    with pytest.raises(CheckpointError, match=r"manifest\.json: state\.json: size: expected at most"):
        resume_from(folder, a_trainer())


def load_size(manifest: Path) -> int:
    import json

    return int(json.loads(manifest.read_text())["files"]["state.json"]["size"])


def test_a_pipe_in_place_of_a_file_does_not_hang(trained: Path, tmp_path: Path) -> None:
    folder = tampered(trained, tmp_path, lambda *_: None)
    file = folder.checkpoints / "step-000000006" / "manifest.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: expected a regular file"):
        resume_from(folder, a_trainer())
