"""Scores of a model on fixed batches: greedy, without gradients or dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.arguments import reject
from retreever.batch import Batch, as_batch, collate, without_padding
from retreever.models.base import Model as OwnModel
from retreever.scaler import Scaled
from retreever.train.feed import likelihood
from retreever.train.protocols import Model, Task
from retreever.train.random import OwnDefault

Means = Float[Tensor, "values batches"]
Measure = Callable[[Batch], Sequence[Tensor]]  # values (b, m), one for every query
JOINED_POINTS = 2**18  # an accelerator takes small batches together, up to this many context and target points
JOINED_COPIES = 2**21  # and up to this many of the points that models read and predict once per sample
SEED = 0  # of the numbers that models draw


def evaluate(model: Model, task: Task | None, batches: Iterable[Batch], device: torch.device | str = "cpu") -> float:
    """Mean over `batches` of the task's metric over their real targets; without a task, of the log-likelihood.

    Batches, or tuples (xc, yc, xt, yt), weigh the same whatever their size: this is how the paper and those before it
    measure. They are checked as those of training. Models that sample draw the same numbers in every call.
    """
    if not isinstance(task, Task | None):
        reject("task", "a task, or None for the log-likelihood", type(task).__name__)
    metric = likelihood if task is None else task.metric

    def measure(batch: Batch) -> list[Tensor]:
        check = model.take if isinstance(model, OwnModel | Scaled) else Batch.validate
        check(batch)
        targets = without_padding(batch.xt, batch.target_mask)
        return [metric(model.predict(batch.xc, batch.yc, targets, batch.context_mask), batch)]

    return float(batch_means(model, measure, batches, device).mean())


def batch_means(model: Model, measure: Measure, batches: Iterable[Batch], device: torch.device | str) -> Means:
    """Means over the real targets of every batch, a row for each of the values that `measure` returns for a batch."""
    if isinstance(batches, Batch):
        reject("batches", "an iterable of batches", "a Batch")
    checked = (as_batch("batches", batch) for batch in batches)
    was_training = model.training
    model.train(False)
    joined = _points_at_once(model, torch.device(device))
    try:
        with torch.inference_mode(), OwnDefault(torch.device(device), SEED).lent():
            means = [_means(measure, group, device) for group in _groups(checked, joined)]
    finally:
        model.train(was_training)
    if not means:
        reject("batches", "at least one batch", "none")
    found = torch.cat(means, dim=1)
    if bad := int(found.isnan().any(dim=0).sum()):
        wanted = "numbers (outputs that are not known are NaN in batch.truth)"
        reject("metric", wanted, f"NaN in {bad} of {found.shape[1]}")
    return found


def _points_at_once(model: Model, device: torch.device) -> int:
    """How many points of small batches go through the model together; 0 takes every batch alone."""
    return 0 if device.type == "cpu" else min(JOINED_POINTS, JOINED_COPIES // getattr(model, "copies", 1))


def _means(measure: Measure, group: list[Batch], device: torch.device | str) -> Means:
    """The means of each batch of a group; all go through the model as one."""
    batch = (group[0] if len(group) == 1 else collate(group)).to(device)
    shape = batch.xt.shape[:2]
    values = measure(batch)
    for value in values:
        if not isinstance(value, Tensor) or value.shape != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            reject("metric", f"one value per query, shape {tuple(shape)}", got)
    stacked = torch.stack([value.double() for value in values])
    real = torch.ones(shape, dtype=torch.bool, device=device) if batch.target_mask is None else batch.target_mask
    rows = [one.xc.shape[0] for one in group]
    pairs = zip(torch.split(stacked, rows, dim=1), torch.split(real, rows), strict=True)
    return torch.stack([part.masked_fill(~mask, 0).sum(dim=(1, 2)) / mask.sum() for part, mask in pairs], dim=1)


def _groups(batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    """Consecutive batches whose points together, padding included, are at most `most`; at least one a group."""
    group: list[Batch] = []
    for batch in batches:
        if group and _points([*group, batch]) > most:
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _points(group: list[Batch]) -> int:
    longest = max(b.xc.shape[1] for b in group) + max(b.xt.shape[1] for b in group)
    return longest * sum(b.xc.shape[0] for b in group)
