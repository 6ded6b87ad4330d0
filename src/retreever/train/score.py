"""Scores of a model on fixed batches: greedy, without gradients or dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from retreever.arguments import reject
from retreever.batch import Batch, collate, without_padding
from retreever.train.protocols import Model, Task
from retreever.train.random import OwnDefault

JOINED_POINTS = 2**18  # an accelerator takes small batches together, up to this many context and target points
JOINED_COPIES = 2**21  # and up to this many of the points that models read and predict once per sample
SEED = 0  # of the numbers that models draw


def evaluate(model: Model, task: Task, batches: Iterable[Batch], device: torch.device | str = "cpu") -> float:
    """Mean over `batches` of the task's metric over their real targets.

    Batches weigh the same whatever their size: this is how the paper and those before it measure. Models that sample
    draw the same numbers in every call.
    """
    if isinstance(batches, Batch):
        reject("batches", "an iterable of batches", "a Batch")
    was_training = model.training
    model.train(False)
    means: list[Tensor] = []
    joined = _points_at_once(model, torch.device(device))
    try:
        with torch.inference_mode(), OwnDefault(torch.device(device), SEED).lent():
            for group in _groups(batches, joined):
                means += _means(model, task, group, device)
    finally:
        model.train(was_training)
    if not means:
        reject("batches", "at least one batch", "none")
    return float(torch.stack(means).mean())


def _points_at_once(model: Model, device: torch.device) -> int:
    """How many points of small batches go through the model together; 0 takes every batch alone."""
    return 0 if device.type == "cpu" else min(JOINED_POINTS, JOINED_COPIES // getattr(model, "copies", 1))


def _means(model: Model, task: Task, group: list[Batch], device: torch.device | str) -> list[Tensor]:
    """The metric's mean over the real targets of each batch; all go through the model as one."""
    batch = (group[0] if len(group) == 1 else collate(group)).to(device)
    dist = model.predict(batch.xc, batch.yc, without_padding(batch.xt, batch.target_mask), batch.context_mask)
    values = task.metric(dist, batch)
    if not isinstance(values, Tensor) or values.shape != batch.xt.shape[:2]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        reject("metric", f"one value per query, shape {tuple(batch.xt.shape[:2])}", got)
    values = values.double()
    real = torch.ones_like(values, dtype=torch.bool) if batch.target_mask is None else batch.target_mask
    rows = [one.xc.shape[0] for one in group]
    pairs = zip(torch.split(values, rows), torch.split(real, rows), strict=True)
    return [value.masked_fill(~mask, 0).sum() / mask.sum() for value, mask in pairs]


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
