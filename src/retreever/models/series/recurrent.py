"""Recurrent models with decay: RNN-Impute, RNN-Decay and GRU-D (Che et al. 2018).

What was last seen loses its meaning with time: missing values decay from the last observation to a mean, hidden states
decay to zero. Both decays are exp(-max(0, w * elapsed + b)), learned. The mean is learned too, and starts at 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from retreever.models.series.base import Elapsed, Memory, SeriesConfig, SeriesModel, answer_head, elapsed_since
from retreever.models.series.observed import Series, Times, pick


class StateDecay(nn.Linear):
    """Decay of every unit of a state, from the times elapsed since i events."""

    def forward(self, elapsed: Float[Tensor, "*b i"]) -> Float[Tensor, "*b d"]:
        return decay(super().forward(elapsed))


class Imputation(nn.Module):
    """Fills in missing values between the last observation and the mean; channels decay independently."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(channels))
        self.rate = nn.Parameter(torch.rand(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, series: Series) -> Float[Tensor, "b n c"]:
        index, times = series.last_seen()
        seen = series.values.gather(1, index.clamp_min(0))
        last = torch.where(index >= 0, seen, self.mean)
        kept = decay(self.rate * (series.times[..., None] - times) + self.bias)
        return torch.where(series.observed, series.values, kept * last + (1 - kept) * self.mean)


class RNNImpute(SeriesModel):
    """A GRU over imputed values, which of them were observed, and the time since the point before."""

    def __init__(self, config: SeriesConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.impute = Imputation(c.channels)
        self.gru = nn.GRU(2 * c.channels + 1, c.hidden, batch_first=True)
        self.elapsed = Elapsed(c.hidden)
        self.head = answer_head(c, c.hidden)

    def summarise(self, series: Series) -> Memory:
        """States after every point, in one call of the GRU."""
        inputs = torch.cat([self.impute(series), series.flags, series.gaps[..., None]], dim=-1)
        return Memory(series, self.gru(inputs)[0])

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """The last state, moved on in a straight line."""
        state = pick(memory.states, memory.series.until(asked))
        return self.elapsed(state, elapsed_since(memory, asked))


class RNNDecay(SeriesModel):
    """A GRU whose state decays between points; missing values are 0."""

    def __init__(self, config: SeriesConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.decay = StateDecay(self._events, c.hidden)
        self.cell = nn.GRUCell(2 * c.channels, c.hidden)
        self.head = answer_head(c, c.hidden)

    @property
    def _events(self) -> int:
        """Number of events since which time counts: one, the point before."""
        return 1

    def summarise(self, series: Series) -> Memory:
        """States after every point. Only the product with the state before has to wait for it."""
        inputs = torch.cat([self._inputs(series), series.flags], dim=-1)
        kept = self.decay(self._since(series))
        state, states = torch.zeros_like(kept[:, 0]), []
        for step in range(kept.shape[1]):
            state = self.cell(inputs[:, step], kept[:, step] * state)
            states.append(state)
        return Memory(series, torch.stack(states, dim=1))

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """The last state, decayed unless it is of the very time asked."""
        count = memory.series.until(asked)
        state = pick(memory.states, count)
        later = elapsed_since(memory, asked)[..., None] > 0
        return torch.where(later, self.decay(self._since_asked(memory, asked)) * state, state)

    def _inputs(self, series: Series) -> Float[Tensor, "b n c"]:
        return series.values

    def _since(self, series: Series) -> Float[Tensor, "b n i"]:
        """Time elapsed at every point since the events before it."""
        return series.gaps[..., None]

    def _since_asked(self, memory: Memory, asked: Times) -> Float[Tensor, "b m i"]:
        return elapsed_since(memory, asked)[..., None]


class GRUD(RNNDecay):
    """GRU-D: missing values decay to the mean, and the state with the time since each channel was observed."""

    def __init__(self, config: SeriesConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.impute = Imputation(self.config.channels)

    @property
    def _events(self) -> int:
        """The last observations of all channels."""
        return self.config.channels

    def _inputs(self, series: Series) -> Float[Tensor, "b n c"]:
        return self.impute(series)

    def _since(self, series: Series) -> Float[Tensor, "b n c"]:
        """Since the last observation strictly before a point, or since the first point."""
        times = series.last_seen()[1]
        before = torch.cat([series.times[:, :1, None].expand_as(times[:, :1]), times[:, :-1]], dim=1)
        return series.times[..., None] - before

    def _since_asked(self, memory: Memory, asked: Times) -> Float[Tensor, "b m c"]:
        series = memory.series
        last = pick(series.last_seen()[1], series.until(asked).clamp_min(1))
        return torch.clamp_min(asked[..., None] - last, 0)


def decay(exponent: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """exp(-max(0, exponent)): 1 keeps everything, 0 forgets."""
    return torch.exp(-F.relu(exponent))
