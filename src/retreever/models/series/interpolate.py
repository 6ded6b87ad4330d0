"""Models that interpolate every channel, then run a GRU: IP-Nets (Shukla and Marlin 2019) and mTAND-Enc (2021).

The reference points of the interpolation are the series' own times. At an asked time the channels are interpolated as
well, and the GRU takes one step from its state at the last reference point before: at a time of the series this is the
GRU's own state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_number
from retreever.batch import Batch
from retreever.models.series.base import Memory, SeriesConfig, SeriesModel, answer_head
from retreever.models.series.observed import Series, Times, pick
from retreever.objective import Loss

LOG2_E = 1 / math.log(2)


def average_observed(
    scores: Float[Tensor, "b #c m n"], series: Series, observed: Bool[Tensor, "b n c"]
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m c"]]:
    """Per channel, the mean of observed values weighted by softmax of `scores`, and log of the sum of the weights.

    A channel without observations has mean 0 and a sum of practically 0.
    """
    nothing = torch.finfo(scores.dtype).min / 4  # finite: a mean over nothing has a gradient then
    seen = scores.masked_fill(~observed.transpose(1, 2)[:, :, None], nothing)
    largest = seen.amax(dim=3, keepdim=True).detach()
    weights = ((seen - largest) * LOG2_E).exp2()  # several times faster than exp where most underflow, on a CPU
    values = series.values.transpose(1, 2)
    sums = weights @ torch.stack([values, torch.ones_like(values)], dim=-1)
    weighted, total = sums.transpose(1, 2).unbind(dim=-1)
    return weighted / total, total.log() + largest[..., 0].transpose(1, 2)


def gru_step(gru: nn.GRU, inputs: Float[Tensor, "b m i"], states: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
    """One step of a GRU of one layer from each of many states."""
    weights: Any = (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)
    return torch.gru_cell(inputs.flatten(0, 1), states.flatten(0, 1), *weights).view_as(states)


@dataclass(frozen=True)
class MTANDEncConfig(SeriesConfig):
    """Settings of mTAND-Enc. The defaults are those published for Human Activity.

    Attributes:
        dim: width of the time embedding.
        frequency: the largest frequency it starts with; attention over time is as sharp as that allows.
    """

    dim: int = 128
    hidden: int = 512
    frequency: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("frequency", self.frequency, minimum=1e-9)


class TimeEmbedding(nn.Module):
    """[w0 t + b0, sin(w1 t + b1), ...]: one linear and many periodic functions of time, all learned."""

    def __init__(self, dim: int, frequency: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(1, dim)
        with torch.no_grad():
            self.linear.weight.mul_(frequency)  # uniform from -1 to 1 before

    def forward(self, times: Times) -> Float[Tensor, "b m d"]:
        phases = self.linear(times[..., None])
        return torch.cat([phases[..., :1], phases[..., 1:].sin()], dim=-1)


class MTANDEnc(SeriesModel):
    """Attention from time to time interpolates every channel; softmax is over the observations of that channel."""

    config: MTANDEncConfig
    settings = MTANDEncConfig

    def __init__(self, config: MTANDEncConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.embed_time = TimeEmbedding(c.dim, c.frequency)
        self.to_q, self.to_k = nn.Linear(c.dim, c.dim), nn.Linear(c.dim, c.dim)
        self.to_inputs = nn.Linear(2 * c.channels, c.hidden)
        self.gru = nn.GRU(c.hidden, c.hidden, batch_first=True)
        self.head = answer_head(c, c.hidden)

    def interpolate(self, series: Series, at: Times) -> Float[Tensor, "b m i"]:
        """Channels at any times, and for each whether it was observed at all, as inputs of the GRU."""
        query, keys = self.to_q(self.embed_time(at)), self.to_k(self.embed_time(series.times))
        scores = query @ keys.transpose(1, 2) / math.sqrt(self.config.dim)
        mean, _ = average_observed(scores[:, None], series, series.observed)
        ever = series.flags.amax(dim=1, keepdim=True)  # the mean of the flags over what was observed
        return self.to_inputs(torch.cat([mean, ever.expand_as(mean)], dim=-1))

    def summarise(self, series: Series) -> Memory:
        """States at the series' own times, in one call of the GRU."""
        return Memory(series, self.gru(self.interpolate(series, series.times))[0])

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """One step of the GRU to the asked time."""
        before = pick(memory.states, memory.series.until(asked, inclusive=False))
        return gru_step(self.gru, self.interpolate(memory.series, asked), before)


@dataclass(frozen=True)
class IPNetsConfig(SeriesConfig):
    """Settings of IP-Nets.

    Attributes:
        width: unit of time of the kernels exp(-alpha (difference / width)^2); alpha starts at softplus(0).
        hide: share of the observations that are hidden and reconstructed while training.
        reconstruction: weight of the loss of that reconstruction.
    """

    hidden: int = 100
    dropout: float = 0.2
    width: float = 0.05
    hide: float = 0.2
    reconstruction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("width", self.width, minimum=1e-9)
        check_number("hide", self.hide, below=1.0)
        check_number("reconstruction", self.reconstruction)


@dataclass(frozen=True)
class SmoothMemory(Memory):
    """`level` is the mean of every smoothed channel over the reference points."""

    level: Float[Tensor, "b 1 c"]


class IPNets(SeriesModel):
    """Kernel smoothers of every channel, mixed across channels; a GRU reads trend, intensity and transient."""

    config: IPNetsConfig
    settings = IPNetsConfig
    memory = SmoothMemory

    def __init__(self, config: IPNetsConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.kappa = nn.Parameter(torch.zeros(c.channels))
        self.mix = nn.Parameter(torch.eye(c.channels))
        self.mean = nn.Parameter(torch.zeros(c.channels))  # of channels that a series does not observe
        self.gru = nn.GRU(3 * c.channels, c.hidden, batch_first=True)
        self.head = answer_head(c, c.hidden)

    def smooth(
        self, series: Series, at: Times, sharpness: float = 1.0, observed: Tensor | None = None
    ) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m c"]]:
        """Smoothed channels at any times, and the log of their intensity (the sum of the kernel)."""
        observed = series.observed if observed is None else observed
        distance = ((at[:, :, None] - series.times[:, None]) / self.config.width).square()
        alpha = sharpness * F.softplus(self.kappa)
        mean, intensity = average_observed(-alpha[:, None, None] * distance[:, None], series, observed)
        return torch.where(observed.any(dim=1, keepdim=True), mean, self.mean), intensity

    def cross(
        self, smoothed: Float[Tensor, "b m c"], intensity: Float[Tensor, "b m c"], level: Float[Tensor, "b 1 c"]
    ) -> Float[Tensor, "b m c"]:
        """The trend of every channel from all channels, each weighted by its share of the intensity."""
        return level + (intensity.softmax(dim=-1) * (smoothed - level)) @ self.mix.T

    def interpolate(
        self, series: Series, at: Times, level: Float[Tensor, "b 1 c"] | None = None
    ) -> tuple[Float[Tensor, "b m i"], Float[Tensor, "b 1 c"]]:
        """Trend, intensity and transient (what a sharper kernel sees beyond the trend) at any times.

        Also returns the `level` of the channels; if it is not given, `at` are the series' own times.
        """
        smoothed, intensity = self.smooth(series, at)
        level = level_of(smoothed, series) if level is None else level
        trend = self.cross(smoothed, intensity, level)
        transient = self.smooth(series, at, sharpness=10.0)[0] - trend
        return self.dropout(torch.cat([trend, intensity.exp(), transient], dim=-1)), level

    def summarise(self, series: Series) -> SmoothMemory:
        """States at the series' own times, in one call of the GRU."""
        inputs, level = self.interpolate(series, series.times)
        return SmoothMemory(series, self.gru(inputs)[0], level)

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """One step of the GRU to the asked time."""
        assert isinstance(memory, SmoothMemory)
        before = pick(memory.states, memory.series.until(asked, inclusive=False))
        inputs, _ = self.interpolate(memory.series, asked, memory.level)
        return gru_step(self.gru, inputs, before)

    def _loss(self, memory: Memory, batch: Batch) -> Loss:
        """In training also the loss of observations hidden at random and reconstructed."""
        loss = super()._loss(memory, batch)
        if not (self.training and self.config.reconstruction):
            return loss
        return loss._replace(total=loss.total + self.config.reconstruction * self.reconstruct(memory.series))

    def reconstruct(self, series: Series) -> Float[Tensor, ""]:
        """Mean squared error of hidden observations, over the variance of their channel in the batch."""
        drawn = torch.rand(series.values.shape, dtype=series.values.dtype, device=series.values.device)
        kept = series.observed & (drawn >= self.config.hide)
        kept = torch.where(kept.any(dim=1, keepdim=True), kept, series.observed)  # never all of a channel
        smoothed, intensity = self.smooth(series, series.times, observed=kept)
        guess = self.cross(smoothed, intensity, level_of(smoothed, series))
        hidden, seen = (series.observed & ~kept).to(guess.dtype), series.flags
        count = seen.sum(dim=(0, 1)).clamp_min(1)
        mean = series.values.sum(dim=(0, 1)) / count
        variance = ((series.values - mean).square() * seen).sum(dim=(0, 1)) / count
        error = (guess - series.values).square() / variance.clamp_min(1e-6)
        return (error * hidden).sum() / hidden.sum().clamp_min(1)


def level_of(smoothed: Float[Tensor, "b n c"], series: Series) -> Float[Tensor, "b 1 c"]:
    """Mean over the real points."""
    real = series.real[..., None]
    return (smoothed * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
