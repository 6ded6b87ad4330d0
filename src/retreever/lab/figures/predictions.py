"""Predictions for figures: in evaluation mode, without gradients, on the model's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import reject
from retreever.batch import Batch
from retreever.train.protocols import Model


@contextmanager
def evaluating(model: Model) -> Iterator[torch.device]:
    """Put the model in evaluation mode inside the block; yields its device."""
    was_training = model.training
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model.train(False)
    try:
        with torch.inference_mode():
            yield device
    finally:
        model.train(was_training)


def predict(model: Model, batch: Batch) -> Distribution:
    """Predictions at the targets of `batch`."""
    with evaluating(model) as device:
        batch = batch.to(device)
        return model.predict(batch.xc, batch.yc, batch.xt, batch.context_mask)


def mean_and_std(dist: Distribution) -> tuple[Float[Tensor, "b m dy"], Float[Tensor, "b m dy"]]:
    """Mean and standard deviation of every predicted value, on the CPU."""
    if len(dist.event_shape) != 1:
        reject("model", "one that predicts values with a mean and a standard deviation", type(dist).__name__)
    return dist.mean.cpu(), dist.stddev.cpu()
