"""Everything a training run is, as named tensors and plain JSON: weights, optimiser, random streams, progress.

Putting it back and going on gives the same bits as never having stopped. Nothing is put back before all of it is known
to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retreever.train.checkpoint import check_fits, refuse
from retreever.train.random import OwnDefault

Streams = dict[str, torch.Generator | OwnDefault]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under `model.`."""
    return {f"model.{name}": value.detach() for name, value in model.state_dict().items()}


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step count of every trained parameter under `optimiser.<parameter>.`; zeros before its first step."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state = optimiser.state.get(parameter) or _fresh_state(parameter)
            tensors |= {f"optimiser.{name}.{key}": value.detach() for key, value in state.items()}
    return tensors


def random_tensors(streams: Streams) -> dict[str, Tensor]:
    """States of the run's random streams."""
    return {f"random.{name}": stream.get_state() for name, stream in streams.items()}


def check_buildable(
    build: Callable[[], nn.Module], layers: object, found: Mapping[str, Tensor | str], source: str | Path
) -> None:
    """Refuse settings whose model the weights `found` in `source` do not fit, before any memory is spent on them."""
    if isinstance(layers, int) and layers > len(found):  # of another type: the model's own check says so
        refuse(source, f"the tensors of {layers} layers", f"{len(found)} tensors")
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, OverflowError, MemoryError) as error:  # sizes beyond any memory
        refuse(source, "settings a model can be built from", error)
    check_fits(source, found, model.state_dict())


def restore_model(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Weights back into `model`; names, dtypes and shapes must be the model's own."""
    found = {name: value for name, value in tensors.items() if name.startswith("model.")}
    check_fits(source, found, model_tensors(model))
    model.load_state_dict({name.removeprefix("model."): value for name, value in found.items()})


def restore_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Moments and step counts, known to fit, back where they were, on the device of their parameter."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            saved = {key: tensors[f"optimiser.{name}.{key}"] for key in _fresh_state(parameter)}
            optimiser.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in saved.items()}


def restore_random(streams: Streams, tensors: dict[str, Tensor], source: Path) -> None:
    """All random streams back to where they were."""
    for name, stream in streams.items():
        state = tensors[f"random.{name}"].cpu().clone()  # torch reads from the start of the memory, also of a view
        try:
            stream.set_state(state)
        except RuntimeError as error:  # as many bytes as it should have, but not those of a generator
            refuse(f"{source}: random.{name}", "the state of a random generator", error)


def _fresh_state(parameter: Tensor) -> dict[str, Any]:
    """What Adam starts from."""
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
