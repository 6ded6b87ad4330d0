"""Trained models from inside the package: `load_pretrained("gp")`. Offline, and checked to the last byte."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from retreever.errors import CheckpointError, ConfigError
from retreever.models.base import Model
from retreever.models.saved import model_from_json
from retreever.pretrained.card import MAX_BYTES, Card, read_bytes, read_card, weights_folder
from retreever.train.checkpoint import check_fits


def load_pretrained(name: str, folder: str | Path | None = None) -> Model:
    """A trained model, on the CPU, in evaluation mode: `load_pretrained("gp").predict(xc, yc, xt)`.

    Args:
        name: of weights that came with the package; `retreever pretrained list` shows them.
        folder: of weights made by `retreever pretrained export`, in place of those in the package.

    Raises:
        InputError: no such name; the message lists those there are.
        CheckpointError: a file is missing, damaged or does not fit; the message names the file and the entry.
    """
    return load_weights(read_card(name, folder), folder)


def load_weights(card: Card, folder: str | Path | None = None) -> Model:
    """The trained model of a card."""
    place = weights_folder(folder)
    file = place.joinpath(f"{card.name}.safetensors")
    tensors = _tensors(str(file), read_bytes(file, MAX_BYTES), card)
    model = _fresh(card, str(place.joinpath(f"{card.name}.json")))
    check_fits(str(file), tensors, model.state_dict())
    model.load_state_dict(tensors)
    return model.eval()


def _fresh(card: Card, file: str) -> Model:
    """The model that the card describes, its weights yet to come."""
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay theirs
            return model_from_json(card.model).float()  # whatever the default dtype is
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: model: {error}") from None


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
