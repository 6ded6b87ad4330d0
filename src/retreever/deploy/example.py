"""Inputs that a model can read, with which its parts are traced: their sizes stay, their numbers do not matter."""

from __future__ import annotations

import torch
from torch import Tensor

from retreever.models.base import Model
from retreever.models.series.base import SeriesModel
from retreever.models.series.observed import context_of

QUERIES = 3  # a program takes any number


def example(model: Model, n: int, batch: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """A context of n points by the names of its tensors, as `encode` and `predict` take them, and a few queries."""
    config = model.config
    b, dx = batch or 2, 1 if config.inputs == "sequence" else config.dim_x
    generator = torch.Generator().manual_seed(0)
    xt = torch.rand(b, QUERIES, dx, generator=generator)
    mask = torch.ones(b, n, dtype=torch.bool)
    if config.inputs == "tokens":
        return {"tokens": torch.rand(b, n, config.dim_y, generator=generator), "mask": mask}, xt
    xc, yc = _points(model, b, n, dx, generator)
    return {"xc": xc, "yc": yc, "mask": mask}, xt


def _points(model: Model, b: int, n: int, dx: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points with values or symbols; times of series are in order, and not every channel is observed."""
    config = model.config
    xc = torch.rand(b, n, dx, generator=generator)
    if config.inputs == "sequence":
        return xc, torch.randint(config.dim_y, (b, n), generator=generator)
    if not isinstance(model, SeriesModel):
        return xc, torch.rand(b, n, config.dim_y, generator=generator)
    times, shape = xc[..., 0].sort(dim=1).values, (b, n, model.config.channels)
    observed = torch.rand(shape, generator=generator) < 0.7
    observed[:, 0] = True  # every series has an observation
    return context_of(times, torch.rand(shape, generator=generator), observed)
