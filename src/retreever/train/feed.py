"""Batches of one's own as a task: a DataLoader or any iterable, with validation batches beside it where there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import reject
from retreever.batch import Batch
from retreever.nn.heads import log_likelihood
from retreever.train.protocols import Task

Metric = Callable[[Distribution, Batch], Tensor]


class Feed:
    """A task whose batches come from an iterable, again from the start whenever it ends.

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
        self.batches = batches
        self.checked = None if validation is None else [as_batch("validation", batch) for batch in validation]
        if self.checked == []:
            reject("validation", "at least one batch, or None", "none")
        self.scored: Metric = metric or likelihood
        self._iterator: Iterator[Any] = iter(())

    @property
    def validates(self) -> bool:
        """Whether there are validation batches."""
        return self.checked is not None

    def training(self, seed: int) -> torch.Generator:
        """A stream that is not drawn from: the iterable decides what comes."""
        return torch.Generator().manual_seed(seed)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """The next batch, whatever its size."""
        found = next(self._iterator, None)
        if found is None:
            self._iterator = iter(self.batches)
            found = next(self._iterator, None)
            if found is None:
                reject("data", "batches in every pass", "an iterable that is exhausted; give a list or a DataLoader")
        return as_batch("data", found).to(device)

    def validation(self) -> Iterator[Batch]:
        """The validation batches."""
        return iter(self.checked or [])

    def metric(self, dist: Distribution, batch: Batch) -> Tensor:
        """One value per query; higher is better."""
        return self.scored(dist, batch)


def likelihood(dist: Distribution, batch: Batch) -> Tensor:
    """Log-likelihood of every query, over its known outputs."""
    return log_likelihood(dist, batch.truth)


def as_batch(argument: str, found: Any) -> Batch:
    """`found` as a `Batch`: as it is, or made of (xc, yc, xt, yt) and masks."""
    if isinstance(found, Batch):
        return found
    if isinstance(found, tuple | list) and 4 <= len(found) <= 7 and all(isinstance(part, Tensor) for part in found[:4]):
        return Batch(*found)
    reject(argument, "items that are a Batch or a tuple (xc, yc, xt, yt)", type(found).__name__)


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
