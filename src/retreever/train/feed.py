"""Batches of one's own as a task: a DataLoader or any iterable, with validation batches beside it where there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import reject
from retreever.batch import Batch, as_batch
from retreever.nn.heads import log_likelihood
from retreever.tasks.seeds import derive_seed
from retreever.train.protocols import Task
from retreever.train.random import OwnDefault

Metric = Callable[[Distribution, Batch], Tensor]


class Feed:
    """A task whose batches come from an iterable, again from the start whenever it ends.

    In every pass torch's generator starts from a state of its own, so that a resumed run can go through the pass it was
    stopped in again, up to where it was, and a shuffled DataLoader has the same order in all processes.

    Args:
        batches: of `Batch`, or of tuples (xc, yc, xt, yt); a DataLoader, a list, a generator function's result...
        validation: batches to steer by; None has none, so that training ends with the last weights.
        metric: (prediction, batch) -> one value per query, higher is better; the log-likelihood unless given.
    """

    def __init__(
        self, batches: Iterable[Any], validation: Iterable[Any] | None = None, metric: Metric | None = None
    ) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, Batch | str | bytes | Tensor):
            reject("data", "a task, a DataLoader or an iterable of batches", type(batches).__name__)
        if not isinstance(validation, Iterable | None) or isinstance(validation, Batch | str | bytes | Tensor):
            reject("validation", "an iterable of batches", type(validation).__name__)
        if metric is not None and not callable(metric):
            reject("metric", "a function (prediction, batch) -> one value per query", repr(metric))
        self.batches = batches
        self.checked = None if validation is None else [as_batch("validation", batch) for batch in validation]
        if self.checked == []:
            reject("validation", "at least one batch, or None", "none")
        self.scored: Metric = metric or likelihood
        self._iterator: Iterator[Any] | None = None
        self._position, self._random = (0, 0), OwnDefault(torch.device("cpu"), 0)

    @property
    def position(self) -> tuple[int, int]:
        """Passes that are over, and batches taken in the present one; set, to go on from there."""
        return self._position

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        """Go on from there."""
        self._position, self._iterator = position, None

    @property
    def validates(self) -> bool:
        """Whether there are validation batches."""
        return self.checked is not None

    def training(self, seed: int) -> torch.Generator:
        """A stream that is not drawn from: its seed decides those of the passes."""
        return torch.Generator().manual_seed(seed)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """The next batch, whatever its size."""
        seed = generator.initial_seed()
        found = self._next(seed)
        if found is None:
            self.position = (self.position[0] + 1, 0)
            found = self._next(seed)
        if found is None:
            reject("data", "batches in every pass", "an iterable that is exhausted; give a list or a DataLoader")
        done, taken = self._position
        self._position = (done, taken + 1)
        return as_batch("data", found).to(device)

    def _next(self, seed: int) -> Any | None:
        """The next of the present pass, whose beginning is gone through again after a restart; None at its end."""
        done, taken = self._position
        if self._iterator is not None:
            with self._random.lent():
                return next(self._iterator, None)
        self._random = OwnDefault(torch.device("cpu"), derive_seed(f"feed {done}", "train", seed))
        with self._random.lent():
            self._iterator = iter(self.batches)
            return next(islice(self._iterator, taken, None), None)

    def validation(self) -> Iterator[Batch]:
        """The validation batches."""
        return iter(self.checked or [])

    def metric(self, dist: Distribution, batch: Batch) -> Tensor:
        """One value per query; higher is better."""
        return self.scored(dist, batch)


def likelihood(dist: Distribution, batch: Batch) -> Tensor:
    """Log-likelihood of every query, over its known outputs."""
    truth, wanted = batch.truth, tuple(dist.batch_shape + dist.event_shape)
    if tuple(truth.shape) != wanted:
        reject("yt", f"shape {wanted}, as predictions have", tuple(truth.shape))
    return log_likelihood(dist, truth)


def as_task(data: Any, validation: Iterable[Any] | None, metric: Metric | None) -> Task:
    """`data` itself where it is a task, else a `Feed` of it."""
    if isinstance(data, Task):
        for name, given in (("validation", validation), ("metric", metric)):
            if given is not None:
                reject(name, "None, as the task has its own", type(given).__name__)
        return data
    if isinstance(data, type):
        reject("task", "a task", f"the class {data.__name__}")
    if any(hasattr(data, name) for name in ("training", "sample")):
        lacks = next(name for name in ("training", "sample", "validation", "metric") if not hasattr(data, name))
        got = f"a {type(data).__name__} without {lacks}"
        reject("task", "a task with training, sample, validation and metric", got)
    return Feed(data, validation, metric)
