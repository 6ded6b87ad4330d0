"""An irregular series as its models read it: sorted times, values, and which values were observed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import reject
from retreever.checks import check_float, check_mask, check_same, check_tensor, values_readable
from retreever.tree.order import in_order, permutation_of

Times = Float[Tensor, "b m"]


@dataclass(frozen=True)
class Series:
    """b series of at most n points and c channels; real points come first.

    Padding repeats the last real time, and nothing is observed there. Values that were not observed are 0.
    """

    times: Float[Tensor, "b n"]
    values: Float[Tensor, "b n c"]
    observed: Bool[Tensor, "b n c"]
    real: Bool[Tensor, "b n"]

    @property
    def flags(self) -> Float[Tensor, "b n c"]:
        """`observed` as 0 and 1, an input of many models."""
        return self.observed.to(self.values.dtype)

    @property
    def gaps(self) -> Float[Tensor, "b n"]:
        """Time since the point before; 0 at the first."""
        return F.pad(self.times.diff(dim=1), (1, 0))

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """Number of real points."""
        return self.real.sum(dim=1)

    def until(self, asked: Times, inclusive: bool = True) -> Int[Tensor, "b m"]:
        """How many real points lie at or before each asked time; before it alone unless `inclusive`."""
        times = self.times.masked_fill(~self.real, torch.inf)
        return torch.searchsorted(times.contiguous(), asked.contiguous(), right=inclusive)

    def last_seen(self) -> tuple[Int[Tensor, "b n c"], Float[Tensor, "b n c"]]:
        """Index and time of the last observation of every channel at or before every point.

        A channel not observed yet has index -1 and the time of the first point.
        """
        points = torch.arange(self.times.shape[1], device=self.times.device)[:, None]
        index = torch.where(self.observed, points, -1).cummax(dim=1).values
        times = self.times[..., None].expand_as(self.values).gather(1, index.clamp_min(0))
        return index, times

    def backwards(self) -> Series:
        """The series from its last point to its first; times are negated, so that they rise."""
        points = torch.arange(self.times.shape[1], device=self.times.device)
        order = (self.lengths[:, None] - 1 - points).clamp_min(0)
        observed = in_order(self.observed, order) & self.real[..., None]
        values = in_order(self.values, order).masked_fill(~observed, 0)
        return Series(-in_order(self.times, order), values, observed, self.real)


def pick(states: Float[Tensor, "b n d"], count: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """The state after `count` points; zeros, the state all models start from, after none."""
    return F.pad(states, (0, 0, 1, 0)).gather(1, count[..., None].expand(-1, -1, states.shape[2]))


def series_of(xc: Float[Tensor, "b n 1"], yc: Float[Tensor, "b n dy"], mask: Bool[Tensor, "b n"] | None) -> Series:
    """The series in the context points of a batch: `yc` holds the channels, then 1 where they were observed, else 0."""
    if mask is None:
        real = torch.ones_like(xc[..., 0], dtype=torch.bool)
    else:
        order = permutation_of("given", xc, mask, 2, 0, 0)
        xc, yc, real = (in_order(part, order) for part in (xc, yc, mask))
    values, flags = yc.chunk(2, dim=-1)
    observed = (flags > 0.5) & real[..., None]
    last = xc[..., 0].gather(1, (real.sum(dim=1, keepdim=True) - 1).clamp_min(0))
    times = torch.where(real, xc[..., 0], last)
    return Series(times, values.masked_fill(~observed, 0), observed, real)


def context_of(
    times: Float[Tensor, "b n"], values: Float[Tensor, "b n c"], observed: Bool[Tensor, "b n c"] | None = None
) -> tuple[Float[Tensor, "b n 1"], Float[Tensor, "b n dy"]]:
    """Context points (xc, yc) of series; without `observed`, values that are not NaN were observed.

    Values that were not observed become 0, so that models that read `yc` as it is do not see them either.
    """
    check_tensor("times", times, "b n")
    check_float("times", times)
    b, n = times.shape
    check_tensor("values", values, "b n c", b=b, n=n)
    check_same("values", values, "times", times)
    if observed is None:
        observed = ~values.isnan()
    check_mask("observed", observed, "b n c", b=b, n=n, c=values.shape[2])
    return times[..., None], torch.cat([values.masked_fill(~observed, 0), observed.to(values)], dim=-1)


def take_observed(xc: Tensor, yc: Tensor, mask: Tensor | None, channels: int) -> Tensor:
    """`yc` with zeros for values that were not observed; raises `InputError` with the series and point at fault.

    Inputs of a wrong shape are returned as they are, for the checks that all models share.
    """
    shape = (*yc.shape[:2], 2 * channels) if isinstance(yc, Tensor) else ()
    good = isinstance(xc, Tensor) and isinstance(yc, Tensor) and xc.shape == (*shape[:2], 1) and yc.shape == shape
    if not good or not yc.dtype.is_floating_point or not (mask is None or mask.shape == shape[:2]):
        return yc
    real = torch.ones_like(xc[..., 0], dtype=torch.bool) if mask is None else mask
    values, flags = yc.chunk(2, dim=-1)
    observed = (flags > 0.5) & real[..., None]
    if values_readable(yc):
        _check_points(xc[..., 0], values, flags, observed, real)
    return torch.cat([values.masked_fill(~observed, 0), flags], dim=-1)


def _check_points(times: Tensor, values: Tensor, flags: Tensor, observed: Tensor, real: Tensor) -> None:
    """Observed values are finite, flags 0 or 1, times in order, and every series has an observation."""
    _refuse(real[..., None] & (flags != 0) & (flags != 1), "yc", "1 where a channel was observed, else 0", flags)
    _refuse(observed & ~values.isfinite(), "yc", "finite values where observed", values)
    _refuse(real & ~times.isfinite(), "xc", "finite times", times)
    latest = times.masked_fill(~real, -torch.inf).cummax(dim=1).values
    _refuse(real & (times < latest), "xc", "times in order", times)
    none = ~observed.flatten(1).any(dim=1)
    if bool(none.any()):
        reject("yc", "at least one observation in every series", f"none in series {int(none.nonzero()[0])}")


def _refuse(wrong: Bool[Tensor, "b n *c"], argument: str, expected: str, found: Tensor) -> None:
    """Raise `InputError` about the first place where `wrong` is True."""
    if not bool(wrong.any()):
        return
    place = wrong.nonzero()[0].tolist()
    names = zip(("series", "point", "channel"), place, strict=False)
    where = ", ".join(f"{name} {number}" for name, number in names)
    reject(argument, expected, f"{float(found[tuple(place)]):g} at {where}")
