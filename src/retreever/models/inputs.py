"""What models accept: checks of context, queries and targets against a model's settings, and how a batch is taken."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.batch import Batch, check_points, without_padding
from retreever.checks import check_finite, check_float, check_like_weights, check_tensor, values_readable
from retreever.models.config import ModelConfig


def check_context(
    model: nn.Module, config: ModelConfig, xc: Tensor, yc: Tensor, mask: Tensor | None, checked: bool = False
) -> None:
    """Context points must have the widths, types and device the model was made for.

    `checked` says that they are known to be points that fit together.
    """
    if not checked:
        check_points("xc", xc, "yc", yc, mask)
    check_tensor("xc", xc, "b n dx", dx=_coordinates(config))
    check_like_weights("xc", xc, model)
    if config.inputs == "sequence":
        _check_classes("yc", yc, f"integers (b={xc.shape[0]}, n={xc.shape[1]})", config.dim_y, mask)
    else:
        check_tensor("yc", yc, "b n dy", dy=config.dim_y)
        check_float("yc", yc)


def check_queries(model: nn.Module, config: ModelConfig, xt: Tensor, b: int) -> None:
    """Queries must have the width, type and device the model was made for, and a row per context."""
    check_tensor("xt", xt, "b m dx", b=b, dx=_coordinates(config))
    check_float("xt", xt)
    check_like_weights("xt", xt, model)
    if not xt.is_cuda:  # reading values there would make every call wait for the device
        check_finite("xt", xt)


def take_batch(model: nn.Module, config: ModelConfig, batch: Batch) -> Batch:
    """The batch, checked against the model and with padding cleared.

    Outputs not known are NaN in `yt`, which heads and rewards pass over.
    """
    if not isinstance(batch, Batch):
        reject("batch", "a Batch", type(batch).__name__)
    batch.validate()
    check_context(model, config, batch.xc, batch.yc, batch.context_mask, checked=True)
    if config.head == "categorical":
        shape = f"integers (b={batch.xt.shape[0]}, m={batch.xt.shape[1]})"
        _check_classes("yt", batch.yt, shape, config.out, batch.target_mask)
    else:
        check_tensor("yt", batch.yt, "b m dy", dy=config.out)
        check_float("yt", batch.yt)
    truth = batch.truth
    if batch.output_mask is None and not values_readable(truth) and truth.dtype.is_floating_point:
        truth = truth.masked_fill(truth.isnan(), torch.inf)  # it could not be checked: no NaN may pass for "not known"
    context = {name: without_padding(getattr(batch, name), batch.context_mask) for name in ("xc", "yc")}
    return replace(batch, **context, xt=without_padding(batch.xt, batch.target_mask), yt=truth)


def _coordinates(config: ModelConfig) -> int:
    return 1 if config.inputs == "sequence" else config.dim_x


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
