"""A model of one's own as one safetensors file: its weights, its settings and, if it is `Scaled`, its scaler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import safetensors
import safetensors.torch
import torch

from retreever.arguments import check_bool, check_path, reject
from retreever.errors import CheckpointError, ConfigError, InputError
from retreever.files import write_bytes
from retreever.models.base import Model
from retreever.models.saved import model_from_json, model_to_json
from retreever.scaler import Scaled, Scaler
from retreever.train.state import check_buildable

ENTRY = "retreever"  # of the file's metadata


def save_model(model: Model | Scaled, file: str | Path, *, overwrite: bool = False) -> Path:
    """Write `model` to `file`, for `load_model`; returns the file. No pickle.

    Parts of one's own (an encoder, an aggregator) cannot be built from settings: save `model.state_dict()` for those.
    A reward of one's own, which predictions do not need, is not saved.
    """
    inner = model.model if isinstance(model, Scaled) else model
    if not isinstance(inner, Model):
        reject("model", "a model of this library, or a Scaled one", type(inner).__name__)
    check_bool("overwrite", overwrite)
    check_path("file", file)
    if Path(file).exists() and not overwrite:
        reject("file", "a new file, or overwrite=True", file)
    settings = {"model": model_to_json(inner), "scaled": isinstance(model, Scaled)}
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    try:
        check_buildable(lambda: _built(settings, tensors), None, tensors, "model")
    except CheckpointError as error:
        reject("model", "parts that its settings describe", f"others ({error})")
    return write_bytes(file, safetensors.torch.save(tensors, {ENTRY: json.dumps(settings)}))


def load_model(file: str | Path) -> Any:
    """The model in a file of `save_model`, on the CPU, in evaluation mode."""

    check_path("file", file)

    def fail(expected: str, got: object) -> NoReturn:
        raise CheckpointError(f"{file}: expected {expected}, got {got}")

    try:
        with safetensors.safe_open(file, "pt") as opened:
            found = (opened.metadata() or {}).get(ENTRY)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        settings = json.loads(found or "null")
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        fail("a file of save_model", error)
    if not tensors or not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        fail("a file of save_model", "one without weights, or without settings of a model")
    try:
        check_buildable(lambda: _built(settings, tensors), settings["model"].get("layers"), tensors, file)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = _built(settings, tensors)
    except (ConfigError, InputError, TypeError, ValueError, KeyError, IndexError) as error:
        fail("settings of a model", error)
    model.load_state_dict(tensors)
    return model.eval()


def _built(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """A fresh model of those settings, in the type of the weights."""
    model = model_from_json(settings["model"]).to(next(iter(tensors.values())).dtype)
    if not settings.get("scaled"):
        return model
    widths = (tensors[f"scaler.{name}"].shape[0] for name in ("x_mean", "y_mean"))
    return Scaled(model, Scaler(*widths).to(next(model.parameters()).dtype))
