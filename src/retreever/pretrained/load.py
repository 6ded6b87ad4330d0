"""Trained models from inside the package: `load_pretrained("gp")`. Offline; every byte is checked."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from retreever.arguments import check_choice
from retreever.errors import CheckpointError, ConfigError
from retreever.models.base import Model
from retreever.models.saved import model_from_json
from retreever.ops.backend import IMPLS, Impl
from retreever.pretrained.card import MAX_BYTES, Card, read_bytes, read_card, weights_folder
from retreever.train.state import check_buildable


def load_pretrained(name: str, folder: str | Path | None = None, *, impl: Impl | None = None) -> Model:
    """A trained model, on the CPU, in evaluation mode: `load_pretrained("gp").predict(xc, yc, xt)`.

    Args:
        name: of weights that came with the package; `retreever pretrained list` shows them.
        folder: of weights made by `retreever pretrained export`, in place of those in the package.
        impl: which kernels the model runs, instead of those on the card; "reference" none, for second derivatives.

    Raises:
        InputError: no such name; the message lists the known ones.
        CheckpointError: a file is missing, damaged or does not fit; the message names the file and the entry.
    """
    if impl is not None:
        check_choice("impl", impl, IMPLS)
    return load_weights(read_card(name, folder), folder, impl)


def load_weights(card: Card, folder: str | Path | None = None, impl: Impl | None = None) -> Model:
    """The trained model of a card."""
    place = weights_folder(folder)
    file = place.joinpath(f"{card.name}.safetensors")
    tensors = _tensors(str(file), read_bytes(file, MAX_BYTES), card)
    source = str(place.joinpath(f"{card.name}.json"))
    check_buildable(lambda: _fresh(card, source, impl), card.model.get("layers"), tensors, str(file))
    with torch.device("cpu"):
        model = _fresh(card, source, impl)
    model.load_state_dict(tensors)
    return model.eval()


def _fresh(card: Card, file: str, impl: Impl | None) -> Model:
    """A freshly initialised model with the settings of the card."""
    try:
        with torch.random.fork_rng(devices=[]):  # leave the state of the global generator as it is
            saved = card.model | ({"impl": impl} if impl else {})
            return model_from_json(saved).float()  # whatever the default dtype is
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{file}: model: {error}") from None


def _tensors(file: str, data: bytes, card: Card) -> dict[str, Tensor]:
    """The tensors in `data`, after checking its size and sha256."""
    if len(data) != card.size:
        raise CheckpointError(f"{file}: size: expected {card.size} bytes, got {len(data)}")
    if (found := sha256(data).hexdigest()) != card.sha256:
        raise CheckpointError(f"{file}: sha256: expected {card.sha256}, got {found}")
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got {error}") from None
