"""Everything a training run is, as named tensors and plain JSON: weights, optimiser, random streams, progress.

Putting it back and going on gives the same bits as never having stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retreever.train.checkpoint import check_fits
from retreever.train.random import OwnDefault

Streams = dict[str, torch.Generator | OwnDefault]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under `model.`."""
    return {f"model.{name}": value.detach() for name, value in model.state_dict().items()}


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts of every parameter under `optimiser.<parameter>.`; none before the first step."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{name}.{key}"] = value.detach()
    return tensors


def random_tensors(streams: Streams) -> dict[str, Tensor]:
    """States of the run's random streams."""
    return {f"random.{name}": stream.get_state() for name, stream in streams.items()}


def restore_model(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Weights back into `model`; names, dtypes and shapes must be the model's own."""
    found = {name: value for name, value in tensors.items() if name.startswith("model.")}
    check_fits(source, found, model_tensors(model))
    model.load_state_dict({name.removeprefix("model."): value for name, value in found.items()})


def restore_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Moments and step counts back where they were, on the device of their parameter."""
    for name, parameter in model.named_parameters():
        prefix = f"optimiser.{name}."
        state: dict[str, Any] = {}
        for key, value in tensors.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value.to(parameter.device, copy=True)
        optimiser.state[parameter] = state


def restore_random(streams: Streams, tensors: dict[str, Tensor]) -> None:
    """All random streams back to where they were."""
    for name, stream in streams.items():
        stream.set_state(tensors[f"random.{name}"].cpu())
