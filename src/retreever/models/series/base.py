"""What all models of irregular series share: settings, checks, and answers at any time.

A series goes in as the context points of a batch: `xc` holds its times in order, `yc` its channels and then, for each
of them, 1 where it was observed and 0 elsewhere (`context_of` makes both). Queries are any times, in any order; the
answer at a time does not depend on the other times asked.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_int, check_number, reject
from retreever.batch import Batch
from retreever.models.base import Contexts, Mask, Model, Targets, Values
from retreever.models.config import AnyConfig, resolve
from retreever.models.series.observed import Series, Times, series_of, take_observed
from retreever.nn.heads import AnyHead, make_head
from retreever.objective import Loss, masked_mean


@dataclass(frozen=True)
class SeriesConfig(AnyConfig):
    """Settings common to all models of series; `dim_y` is twice the number of channels.

    Attributes:
        hidden: width of the recurrent state.
        dropout: of the features that the head reads.
    """

    dim_y: int = 2
    hidden: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("hidden", self.hidden, 1)
        check_number("dropout", self.dropout, below=1.0)
        if self.dim_x != 1 or self.inputs != "points":
            reject("dim_x", "1, the time", f"{self.dim_x} with inputs {self.inputs!r}")
        if self.dim_y % 2:
            reject("dim_y", "an even number: the channels, and whether each was observed", self.dim_y)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.dim_y // 2

    @property
    def out(self) -> int:
        """Values or classes predicted per query; without `outputs`, a value per channel."""
        return self.outputs or self.channels


@dataclass(frozen=True)
class Memory:
    """A series and what a model made of it: a state per point, in most models."""

    series: Series
    states: Float[Tensor, "b n d"]

    @property
    def rows(self) -> int:
        """Number of series."""
        return self.series.times.shape[0]


class SeriesModel(Model):
    """A model with `summarise`, which reads a series, and `features`, which the head turns into an answer."""

    config: SeriesConfig
    settings: ClassVar[type[SeriesConfig]] = SeriesConfig
    memory: ClassVar[Any] = Memory
    capturable: bool = True  # whether a step can be one CUDA graph

    def __init__(self, config: SeriesConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(self.settings, config, fields)
        self.dropout = nn.Dropout(self.config.dropout)

    @abstractmethod
    def summarise(self, series: Series) -> Memory:
        """Read a series."""

    @abstractmethod
    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """Features at any times, for the head."""

    def encode(self, xc: Contexts, yc: Values, mask: Mask = None) -> Memory:
        """Read series (xc, yc); `mask` is True at real points. Values that were not observed may be NaN."""
        return super().encode(xc, take_observed(xc, yc, mask, self.config.channels), mask)

    def loss(self, batch: Batch) -> Loss:
        """Task loss, mean over real targets."""
        batch = self.take(batch)
        return self._loss(self._encode(batch.xc, batch.yc, batch.context_mask), batch)

    def take(self, batch: Batch) -> Batch:
        """As of other models; values that were not observed may be NaN."""
        if isinstance(batch, Batch):
            yc = take_observed(batch.xc, batch.yc, batch.context_mask, self.config.channels)
            batch = replace(batch, yc=yc)
        return super().take(batch)

    def tokens(self, n: int) -> int:
        """0: a query reads a state, no tokens."""
        return 0

    def _loss(self, memory: Memory, batch: Batch) -> Loss:
        task = self.head.loss(self._answer(memory, batch.xt), batch.yt)
        return Loss.only_task(masked_mean(task, batch.target_mask))

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Memory:
        return self.summarise(series_of(xc, yc, mask))

    def _answer(self, memory: Memory, xt: Targets) -> Distribution:
        return self.head(self.dropout(self.features(memory, xt[..., 0])))


class Elapsed(nn.Linear):
    """Adds to a state a vector times the time since: nothing at the time of the state itself."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, states: Float[Tensor, "b m d"], elapsed: Times) -> Float[Tensor, "b m d"]:  # type: ignore[override]
        return states + super().forward(elapsed[..., None])


def answer_head(config: SeriesConfig, width: int, hidden: int = 1, depth: int = 1) -> AnyHead:
    """A head of `depth` linear layers on features of `width`: one, as published for most of these models."""
    return make_head(config.head, width, hidden, config.out, depth=depth)


def elapsed_since(memory: Memory, asked: Times) -> Times:
    """Time from the last real point at or before each asked time; 0 before the first."""
    series = memory.series
    last = (series.until(asked) - 1).clamp_min(0)
    return torch.clamp_min(asked - series.times.gather(1, last), 0)
