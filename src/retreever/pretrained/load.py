"""Trained models from inside the package: `load_pretrained("gp")`. Offline, and checked to the last byte."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor, nn

from retreever.errors import CheckpointError, ConfigError
from retreever.pretrained.card import MAX_BYTES, Card, read_bytes, read_card, weights_folder
from retreever.train.checkpoint import check_fits

if TYPE_CHECKING:
    from retreever.recipes.build import AnyModel
    from retreever.recipes.settings import Settings


def load_pretrained(name: str, folder: str | Path | None = None) -> AnyModel:
    """A trained model, on the CPU, in evaluation mode: `load_pretrained("gp").predict(xc, yc, xt)`.

    Args:
        name: of weights that came with the package; `retreever pretrained list` shows them.
        folder: of weights made by `retreever pretrained export`, in place of those in the package.

    Raises:
        InputError: no such name; the message lists those there are.
        CheckpointError: a file is missing, damaged or does not fit; the message names the file and the entry.
    """
    return load_weights(read_card(name, folder), folder)[1]


def load_weights(card: Card, folder: str | Path | None = None) -> tuple[Settings, AnyModel]:
    """Settings and trained model of a card."""
    place = weights_folder(folder)
    file = place.joinpath(f"{card.name}.safetensors")
    tensors = _tensors(str(file), read_bytes(file, MAX_BYTES), card)
    settings, model = _fresh(card, str(place.joinpath(f"{card.name}.json")))
    module: nn.Module = model
    check_fits(str(file), tensors, module.state_dict())
    module.load_state_dict(tensors)
    module.eval()
    return settings, model


def _fresh(card: Card, file: str) -> tuple[Settings, AnyModel]:
    """The model that the card's settings build, its weights yet to come."""
    from retreever.recipes.options import RECIPES

    task = card.settings.get("task")
    if not isinstance(task, str) or task not in RECIPES:
        raise CheckpointError(f"{file}: settings.task: expected one of {', '.join(RECIPES)}, got {task!r}")
    try:
        settings = RECIPES[task].from_json(card.settings)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay theirs
            return settings, settings.make_model().float()  # whatever the default dtype is
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: settings: {error}") from None


def _tensors(file: str, data: bytes, card: Card) -> dict[str, Tensor]:
    """The bytes that are checked are the bytes that are used."""
    if len(data) != card.size:
        raise CheckpointError(f"{file}: size: expected {card.size} bytes, got {len(data)}")
    if (found := sha256(data).hexdigest()) != card.sha256:
        raise CheckpointError(f"{file}: sha256: expected {card.sha256}, got {found}")
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got {error}") from None
