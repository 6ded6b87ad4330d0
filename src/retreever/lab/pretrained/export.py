"""Exports a finished run as weights for redistribution: the tensors and their card."""

from __future__ import annotations

import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.errors import CheckpointError, ConfigError
from retreever.files import os_errors, write_bytes, write_text
from retreever.lab.pretrained.about import ABOUT, NEVER
from retreever.lab.pretrained.probe import probe
from retreever.lab.recipes.command import find_run, load_run
from retreever.models.saved import model_to_json
from retreever.pretrained.card import MAX_BYTES, TOLERANCE, Card
from retreever.train.run import read_json

LICENSE = "MIT"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def export_run(run: Path, name: str, out: Path, data_note: str = "", overwrite: bool = False) -> Path:
    """Write `out`/`name`.safetensors and `out`/`name`.json, the card, from a finished run's best weights.

    `data_note` says what the data files were; generated data need no note. Returns the card's file.
    """
    if not _NAME.fullmatch(name):
        reject("name", "lower-case letters, digits and single hyphens", repr(name))
    weights, target = out / f"{name}.safetensors", out / f"{name}.json"
    taken = [str(file) for file in (weights, target) if file.exists()]
    if taken and not overwrite:
        raise ConfigError(f"out: expected no weights called {name}, got {' and '.join(taken)} (--overwrite)")
    data, card = _contents(run, name, data_note)
    with os_errors(target, "cannot be replaced", CheckpointError):
        target.unlink(missing_ok=True)  # never leave a card beside weights of another run
    write_bytes(weights, data, CheckpointError)
    return write_text(target, card.to_text(), CheckpointError)


def _contents(run: Path, name: str, data_note: str) -> tuple[bytes, Card]:
    """Contents of both files; raises `ConfigError` for runs that must not be redistributed."""
    folder = find_run(run)
    task, result = folder.config().get("task"), folder.result
    if task in NEVER:
        raise ConfigError(f"{run}: {NEVER[task]}")
    if not result.exists():
        raise ConfigError(f"{run}: expected a finished run, got one without {result.name}")
    recipe, model, step = load_run(run)
    about = ABOUT[recipe.task.name]
    note = data_note or about.data
    if not note:
        reject("data_note", f"what the {recipe.task.name} files were, in words", "none")
    data = _packed(run, model)
    card = Card(
        name=name, title=about.title, use=about.use, limits=about.limits, data=note, terms=about.terms,
        license=LICENSE, model=model_to_json(model), settings=recipe.to_json(), best_step=step, tolerance=TOLERANCE,
        size=len(data), sha256=sha256(data).hexdigest(), probe=probe(model), **_result_entries(result),
    )  # fmt: skip
    return data, card


def _result_entries(file: Path) -> dict[str, Any]:
    """Entries of the card from the run's result file."""
    result = read_json(file)
    kept = (
        "steps", "metric", "scores", "validation", "tokens", "context", "parameters", "seconds", "hardware", "versions",
    )  # fmt: skip
    for key in kept:
        if key not in result:
            raise ConfigError(f"{file}: {key}: expected an entry, got none")
    if not isinstance(result["scores"], dict):
        raise ConfigError(f"{file}: scores: expected an object, got {type(result['scores']).__name__}")
    for key, value in result["scores"].items():
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{file}: scores.{key}: expected a finite number, got {value}")
    return {key: result[key] for key in kept}


def _packed(run: Path, model: nn.Module) -> bytes:
    """The tensors of the model as the bytes of a safetensors file."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{run}: {key}: expected finite numbers of torch.float32, got {tensor.dtype}")
        tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = safetensors.torch.save(tensors)
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{run}: expected weights of at most {MAX_BYTES:,} bytes, got {len(data):,}")
    return data
