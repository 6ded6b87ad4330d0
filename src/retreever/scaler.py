"""`Scaler`: inputs and targets of one's own brought to about one and back, saved with the weights of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from retreever.arguments import check_int, reject
from retreever.batch import Batch, as_batch
from retreever.checks import check_finite, check_tensor
from retreever.models.config import AnyConfig
from retreever.nn.mixture import FunctionMixture
from retreever.objective import Loss

SMALLEST = 1e-6  # spread of a column that does not vary
UNITLESS = ("draws_for", "tokens", "copies", "capturable")  # of a model, the same in all units


class Scaler(nn.Module):
    """Columns minus their mean, divided by their spread; `invert` takes predictions back. Fitted by `Scaler.of`.

    The context may have more columns than there are outputs: as many flags again, 1 where a value is known, or others.
    Only the first `outputs` columns are scaled, and with flags an unknown value stays 0.
    """

    def __init__(self, coordinates: int, outputs: int) -> None:
        super().__init__()
        for name, size in (("coordinates", coordinates), ("outputs", outputs)):
            check_int(name, size, 1)
        self.x_mean, self.x_spread = nn.Buffer(torch.zeros(coordinates)), nn.Buffer(torch.ones(coordinates))
        self.y_mean, self.y_spread = nn.Buffer(torch.zeros(outputs)), nn.Buffer(torch.ones(outputs))

    @classmethod
    def of(cls, batches: Batch | Iterable[Batch]) -> Scaler:
        """Fitted to the real targets and context points of `batches`; unknown outputs do not count."""
        found = [as_batch("batches", batch) for batch in ([batches] if isinstance(batches, Batch) else batches)]
        if not found:
            reject("batches", "at least one batch", "none")
        for batch in found:
            check_tensor("xc", batch.xc, "b n dx")
            check_finite("xc", batch.xc, batch.context_mask)
            if not batch.check_targets().yt.dtype.is_floating_point:
                reject("yt", "floats (b, m, dy), since classes have no scale", f"{batch.yt.dtype}")
        xs = [_real(b.xc, b.context_mask) for b in found] + [_real(b.xt, b.target_mask) for b in found]
        ys = torch.cat([_real(b.truth, b.target_mask) for b in found])
        moments = (*_moments(torch.cat(xs)), *_moments(ys))
        if not all(part.isfinite().all() for part in moments):
            reject("batches", "finite coordinates and values", "infinite ones")
        scaler = cls(xs[0].shape[-1], ys.shape[-1])
        scaler.load_state_dict(dict(zip(scaler.state_dict(), moments, strict=True)))
        return scaler

    def x(self, x: Float[Tensor, "b n dx"], argument: str = "xc") -> Float[Tensor, "b n dx"]:
        """Scaled coordinates; `argument` is their name in errors."""
        check_tensor(argument, x, "b n dx", dx=len(self.x_mean))
        return (x - self.x_mean) / self.x_spread

    def context(self, y: Float[Tensor, "b n dy"]) -> Float[Tensor, "b n dy"]:
        """Scaled values of context points."""
        out = len(self.y_mean)
        check_tensor("yc", y, "b n dy")
        if y.shape[2] < out:  # more columns are flags, or whatever the model knows
            check_tensor("yc", y, "b n dy", dy=out)
        values, more = (y[..., :out] - self.y_mean) / self.y_spread, y[..., out:]
        return torch.cat([values * more if more.shape[-1] == out else values, more], dim=-1)

    def batch(self, batch: Batch) -> Batch:
        """The scaled batch."""
        if not isinstance(batch, Batch):
            reject("batch", "a Batch", type(batch).__name__)
        check_tensor("yt", batch.yt, "b m dy", dy=len(self.y_mean))
        yt = (batch.yt - self.y_mean) / self.y_spread
        return replace(batch, xc=self.x(batch.xc), yc=self.context(batch.yc), xt=self.x(batch.xt, "xt"), yt=yt)

    def invert(self, dist: Distribution) -> Distribution:
        """Predictions in the units of the targets."""
        if isinstance(dist, FunctionMixture):
            return FunctionMixture(self.invert(dist.components))
        if not isinstance(dist, Independent) or not isinstance(dist.base_dist, Normal):
            reject("dist", "normal predictions", type(dist).__name__)
        mean, spread = dist.base_dist.loc, dist.base_dist.scale
        scaled = Normal(mean * self.y_spread + self.y_mean, spread * self.y_spread, validate_args=False)
        return Independent(scaled, 1, validate_args=False)


class Scaled(nn.Module):
    """A model in the units of the data: what goes in is scaled, what comes out is scaled back.

    `state_dict` holds both; `fit`, `fit_staged`, `evaluate` and `predict` take it as any model. Whatever else a model
    can do, `scaled.model` does in scaled units.
    """

    def __init__(self, model: Any, scaler: Scaler) -> None:
        super().__init__()
        if not isinstance(scaler, Scaler):
            reject("scaler", "a Scaler", type(scaler).__name__)
        config = getattr(model, "config", None)
        if isinstance(config, AnyConfig) and config.head == "categorical":
            reject("model", "one that predicts numbers, since classes have no scale", f"the head {config.head}")
        widths = len(scaler.x_mean), len(scaler.y_mean)
        if isinstance(config, AnyConfig) and widths != (config.dim_x, config.out):
            wanted = f"as many coordinates and outputs as the model has, {config.dim_x} and {config.out}"
            reject("scaler", wanted, widths)
        self.model, self.scaler = model, scaler

    def predict(self, xc: Tensor, yc: Tensor, xt: Tensor, mask: Tensor | None = None, **reading: Any) -> Distribution:
        """Predictions in the units of the targets; `reading` goes to the model."""
        scaler = self.scaler
        inputs = scaler.x(xc), scaler.context(yc), scaler.x(xt, "xt")
        return scaler.invert(self.model.predict(*inputs, mask, **reading))

    def encode(self, xc: Tensor, yc: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        """Prepare context points for any number of calls of `answer`."""
        return self.model.encode(self.scaler.x(xc), self.scaler.context(yc), mask, **more)

    def answer(self, memory: Any, xt: Tensor, **reading: Any) -> Distribution:
        """Predictions from a prepared context, in the units of the targets."""
        return self.scaler.invert(self.model.answer(memory, self.scaler.x(xt, "xt"), **reading))

    def set_reading(self, *reading: Any, **named: Any) -> Scaled:
        """As of the model; returns this one."""
        self.model.set_reading(*reading, **named)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in UNITLESS else super().__getattr__(name)

    def take(self, batch: Batch) -> Batch:
        """The scaled batch, checked against the model."""
        taken: Batch = self.model.take(self.scaler.batch(batch))
        return taken

    def loss(self, batch: Batch, *draws: Any) -> Loss:
        """The loss of the scaled batch."""
        return self.model.loss(self.scaler.batch(batch), *draws)

    def forward(self, first: Batch | tuple[Tensor, ...] | Tensor, *rest: Any, **named: Any) -> Any:
        if isinstance(first, Batch | tuple | list):
            return self.loss(as_batch("batch", first), *rest)
        return self.predict(first, *rest, **named)


def _real(values: Tensor, mask: Tensor | None) -> Float[Tensor, "points d"]:
    return values.flatten(0, 1) if mask is None else values[mask]


def _moments(values: Float[Tensor, "points d"]) -> tuple[Tensor, Tensor]:
    """Mean and spread of every column over its known values, summed in float64: years are far from 0, and close."""
    known, dtype = ~values.isnan(), values.dtype
    values = values.double()
    count = known.sum(dim=0).clamp_min(1)
    mean = values.nan_to_num().sum(dim=0) / count
    spread = ((values - mean).nan_to_num().square().sum(dim=0) / count).sqrt()
    return mean.to(dtype), torch.where(spread > SMALLEST, spread, 1.0).to(dtype)
