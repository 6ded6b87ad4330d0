"""SeFT, set functions for time series (Horn et al. 2020), in its online form: an answer at every time of a series.

Observations are a set of (time, value, channel). Attention over all observations up to now is a ratio of two running
sums, so all answers cost one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from retreever.arguments import check_int, check_number
from retreever.models.series.base import Elapsed, Memory, SeriesConfig, SeriesModel, answer_head, elapsed_since
from retreever.models.series.observed import Series, Times, pick
from retreever.nn.blocks import MLP

LARGEST = 60.0  # scores: sums of their exponentials stay finite without a maximum, which would look ahead


@dataclass(frozen=True)
class SeFTConfig(SeriesConfig):
    """Settings of SeFT; `dim` is the width of sums over sets, `hidden` that of the layers of phi and rho.

    Attributes:
        positions: width of the time embedding, half sines and half cosines.
        max_time: their frequencies reach from 1 to this, for times from about 0 to 1.
    """

    dim: int = 128
    hidden: int = 32
    positions: int = 8
    max_time: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("positions", self.positions, 2)
        check_number("max_time", self.max_time, minimum=1.0)


class SeFT(SeriesModel):
    """Encodes observations one by one (phi), averages them by attention, reads the average (rho)."""

    config: SeFTConfig
    settings = SeFTConfig

    def __init__(self, config: SeFTConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        element = 2 * (c.positions // 2) + 1 + c.channels
        self.phi = MLP(element, c.hidden, c.dim, 4)
        self.psi = MLP(element, 64, c.dim, 3)
        self.summary = nn.Linear(c.dim, c.dim)
        self.to_k = nn.Linear(element + c.dim, c.heads * c.dim, bias=False)
        self.elapsed = Elapsed(c.heads * c.dim)
        self.head = answer_head(c, c.heads * c.dim, c.hidden, 4)
        for layer in (module for module in self.modules() if isinstance(module, nn.Linear) and module.bias is not None):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.query = nn.Parameter(torch.zeros(c.heads, c.dim))  # at first all observations weigh the same

    def elements(self, series: Series) -> Float[Tensor, "b n c e"]:
        """Time, value and channel of every possible observation."""
        c = self.config
        powers = torch.linspace(0, 1, c.positions // 2, dtype=series.times.dtype, device=series.times.device)
        angles = series.times[..., None] * c.max_time**powers
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :, None].expand(-1, -1, c.channels, -1)
        channel = torch.eye(c.channels, dtype=waves.dtype, device=waves.device).expand(*waves.shape[:2], -1, -1)
        return torch.cat([waves, series.values[..., None], channel], dim=-1)

    def scores(self, series: Series, elements: Float[Tensor, "b n c e"]) -> Float[Tensor, "b n c h"]:
        """Keys see their element and the mean of psi over all observations up to its time.

        The query is the same for all, so it is multiplied into the weights of the keys first.
        """
        c = self.config
        total = (F.relu(self.psi(elements)) * series.flags[..., None]).sum(dim=2).cumsum(dim=1)
        count = series.flags.sum(dim=2, keepdim=True).cumsum(dim=1).clamp_min(1)
        mean = pick(total / count, series.until(series.times))  # points at the same time see each other
        weight = torch.einsum("hdi,hd->hi", self.to_k.weight.view(c.heads, c.dim, -1), self.query)
        of_element, of_summary = weight[:, : -c.dim], weight[:, -c.dim :]
        scores = F.linear(elements, of_element) + F.linear(F.relu(self.summary(mean)), of_summary)[:, :, None]
        return (scores / math.sqrt(c.dim)).clamp(-LARGEST, LARGEST)

    def summarise(self, series: Series) -> Memory:
        """Running sums of the weights, and of phi times the weights, for every head."""
        elements = self.elements(series)
        weights = self.scores(series, elements).exp() * series.flags[..., None]
        sums = torch.einsum("bnch,bncd->bnhd", weights, self.phi(elements)).flatten(2)
        return Memory(series, torch.cat([weights.sum(dim=2), sums], dim=-1).cumsum(dim=1))

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """The average over all observations at or before each asked time."""
        sums = pick(memory.states, memory.series.until(asked))
        heads = self.config.heads
        weight, rest = sums[..., :heads], torch.unflatten(sums[..., heads:], -1, (heads, -1))
        averages = rest / weight[..., None].clamp_min(1e-30)  # zeros before the first observation
        return self.elapsed(averages.flatten(2), elapsed_since(memory, asked))
