"""What models accept: checks of context, queries and targets against a model's settings, and how a batch is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from retreever.arguments import reject
from retreever.batch import Batch, check_points, without_padding
from retreever.checks import check_finite, check_float, check_same, check_tensor, values_readable
from retreever.models.config import ModelConfig


def check_context(config: ModelConfig, weight: Tensor, xc: Tensor, yc: Tensor, mask: Tensor | None) -> None:
    """Context points must have the widths, types and device the model was made for."""
    check_points("xc", xc, "yc", yc, mask)
    check_tensor("xc", xc, "b n dx", dx=_coordinates(config))
    _check_like_weights("xc", xc, weight)
    if config.inputs == "sequence":
        _check_classes("yc", yc, f"integers (b={xc.shape[0]}, n={xc.shape[1]})", config.dim_y, mask)
    else:
        check_tensor("yc", yc, "b n dy", dy=config.dim_y)
        check_float("yc", yc)


def check_queries(config: ModelConfig, weight: Tensor, xt: Tensor, b: int) -> None:
    """Queries must have the width, type and device the model was made for, and a row per context."""
    check_tensor("xt", xt, "b m dx", b=b, dx=_coordinates(config))
    check_float("xt", xt)
    _check_like_weights("xt", xt, weight)
    if not xt.is_cuda:  # reading values there would make every call wait for the device
        check_finite("xt", xt)


def take_targets(config: ModelConfig, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where predictions are wanted and what is true there, padding cleared, checked against what the head predicts.

    Outputs not known are NaN, which heads and rewards pass over.
    """
    if not isinstance(batch, Batch):
        reject("batch", "a Batch", type(batch).__name__)
    batch.validate()
    if config.head == "categorical":
        shape = f"integers (b={batch.xt.shape[0]}, m={batch.xt.shape[1]})"
        _check_classes("yt", batch.yt, shape, config.out, batch.target_mask)
    else:
        check_tensor("yt", batch.yt, "b m dy", dy=config.out)
        check_float("yt", batch.yt)
    truth = batch.truth
    if batch.output_mask is None and not values_readable(truth) and truth.dtype.is_floating_point:
        truth = truth.masked_fill(truth.isnan(), torch.inf)  # nobody could check it: no NaN may pass for "not known"
    return without_padding(batch.xt, batch.target_mask), truth


def _coordinates(config: ModelConfig) -> int:
    return 1 if config.inputs == "sequence" else config.dim_x


def _check_like_weights(argument: str, value: Tensor, weight: Tensor) -> None:
    check_same(argument, value, "the weights", weight, dtype=False)
    if not torch.is_autocast_enabled(value.device.type):
        check_same(argument, value, "the weights", weight)


def _check_classes(argument: str, y: Tensor, shape: str, count: int, mask: Tensor | None) -> None:
    """`y` must hold integers of that shape, from 0 to count - 1 wherever `mask` calls them real."""
    if y.dim() != 2:
        reject(argument, shape, tuple(y.shape))
    if y.dtype != torch.int64:
        reject(argument, f"{shape} of dtype torch.int64", y.dtype)
    if not values_readable(y):
        return
    real = without_padding(y, mask)
    if bool(((real < 0) | (real >= count)).any()):
        reject(argument, f"integers from 0 to {count - 1}", f"{int(real.min())} to {int(real.max())}")
