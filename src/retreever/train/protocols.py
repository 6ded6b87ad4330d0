"""What training needs of models and tasks, and what it tells those who watch. Any class that fits will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.objective import Loss
from retreever.tasks.padding import Room, Sizes


@runtime_checkable
class Model(Protocol):
    """An `nn.Module` with `predict` and `loss`."""

    training: bool

    def predict(self, xc: Tensor, yc: Tensor, xt: Tensor, mask: Tensor | None = None) -> Distribution:
        """Predictions at `xt`."""
        ...

    def loss(self, batch: Batch) -> Loss:
        """Training loss."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Set the mode, as `nn.Module.train` does."""
        ...

    def to(self, device: str) -> Any:
        """Move to a device, as `nn.Module.to` does."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights, as `nn.Module.parameters` gives them."""
        ...


class Draws(Protocol):
    """Random numbers that fix the paths of one training step."""

    def rows(self, which: slice) -> Draws:
        """Those of some tasks of the batch."""
        ...


@runtime_checkable
class Searches(Protocol):
    """A model that samples paths; its random numbers are drawn for it, so that a run can be repeated and shared out.

    Its `loss` takes them after the batch, and a function that means a tensor over all processes.
    """

    def draws_for(self, batch: Batch, generator: torch.Generator) -> Draws:
        """Draws for the whole batch."""
        ...


@runtime_checkable
class Task(Protocol):
    """Fresh batches, fixed validation batches, a metric per query."""

    def training(self, seed: int) -> torch.Generator:
        """The stream training data comes from."""
        ...

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """A fresh batch."""
        ...

    def validation(self) -> Iterator[Batch]:
        """Fixed batches to steer by."""
        ...

    def metric(self, dist: Distribution, batch: Batch) -> Tensor:
        """One value per query (b, m); higher is better."""
        ...


@runtime_checkable
class Padded(Protocol):
    """A task that can also give batches in a few fixed shapes, padded and masked, made on the device without waiting.

    Then a whole training step, data included, can be one CUDA graph per shape.
    """

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """Numbers of context and target points of the next batch, and the room (one of a few) they need."""
        ...

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Tensor, room: Room) -> Batch:
        """As `sample`, on the generator's device, of the shape `room` says; `sizes` (n, m) lies there too."""
        ...


@runtime_checkable
class Positioned(Protocol):
    """A task whose batches come in an order of their own, so that a resumed run has to know how far it was."""

    position: tuple[int, int]


@dataclass(frozen=True)
class Record:
    """One look at the validation set; `terms` are the parts of the training loss at that step."""

    step: int
    metric: float
    loss: float
    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    metric: float | None
    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)


Watcher = Callable[[Progress], None]


def as_rows(history: list[Record], metric: str = "metric") -> list[dict[str, float]]:
    """Plain dictionaries, for JSON and figures; the metric goes by the name `metric`."""
    return [{"step": r.step, metric: r.metric, "loss": r.loss, "seconds": r.seconds} for r in history]
