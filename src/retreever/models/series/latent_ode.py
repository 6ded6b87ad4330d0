"""Latent ODEs (Rubanova et al. 2019): a series is read backwards into a distribution of z0, from which z(t) follows.

The encoder is a GRU (L-ODE-RNN) or an ODE-RNN (L-ODE-ODE). As published for Human Activity, the loss is that of the
answers alone, averaged over a few draws of z0; outside training z0 is its mean.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int
from retreever.batch import Batch
from retreever.models.series.base import Memory, SeriesModel, answer_head
from retreever.models.series.observed import Series, Times, pick
from retreever.models.series.ode import solve_adaptive, solve_fixed
from retreever.models.series.ode_rnn import ODERecurrence, ODERNNConfig, ode_net
from retreever.nn.blocks import MLP
from retreever.objective import Loss

Solver = Literal["fixed", "adaptive"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)


@dataclass(frozen=True)
class LatentODEConfig(ODERNNConfig):
    """Settings of latent ODEs; the defaults are the published sizes for Human Activity.

    Attributes:
        latents: width of z.
        layers: layers of the ODE's net beyond its first and last.
        encoder_layers: the same, in the encoder of L-ODE-ODE.
        samples: draws of z0 in training.
        solver: "fixed" takes `steps` steps of fifth order over each series; "adaptive" is dopri5 of torchdiffeq with
            relative tolerance 1e-3 and absolute 1e-4, as published, and cannot run in a CUDA graph.
        steps: of the fixed solver.
    """

    latents: int = 15
    layers: int = 2
    encoder_layers: int = 4
    samples: int = 3
    solver: Solver = "fixed"
    steps: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("latents", "samples"):
            check_int(name, getattr(self, name), 1)
        check_int("encoder_layers", self.encoder_layers, 0)
        check_choice("solver", self.solver, SOLVERS)


class LatentModel(SeriesModel):
    """What both latent ODEs share; `evaluations` counts those of the ODE's net in the last answer."""

    config: LatentODEConfig
    settings = LatentODEConfig

    def __init__(self, config: LatentODEConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.field = ode_net(c.latents, c.layers, c.units)
        self.head = answer_head(c, c.latents)
        self.capturable = c.solver == "fixed"
        self.evaluations = 0

    @abstractmethod
    def initial(self, series: Series) -> Float[Tensor, "b two_l"]:
        """Mean and raw spread of z0, from the series read backwards."""

    def summarise(self, series: Series) -> Memory:
        """The distribution of z0 at the time of the first point: `states` are its mean and its spread."""
        mean, spread = self.initial(series.backwards()).chunk(2, dim=-1)
        return Memory(series, torch.stack([mean, spread.abs()], dim=1))

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m l"]:
        """z at the asked times; before the first point it is z0."""
        mean, spread = memory.states.unbind(dim=1)
        start = mean + spread * torch.randn_like(mean) if self.training else mean
        since = (asked - memory.series.times[:, :1]).clamp_min(0)
        self.evaluations = 0
        if self.config.solver == "adaptive":
            return solve_adaptive(self._slope, start, since)
        return solve_fixed(self._slope, start, since, self.config.steps)

    def _loss(self, memory: Memory, batch: Batch) -> Loss:
        """In training also the mean over draws of z0."""
        draws = self.config.samples if self.training else 1
        return super()._loss(_repeated(memory, draws), _repeated(batch, draws))

    def _slope(self, z: Float[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        self.evaluations += 1
        return self.field(z)


class LatentODERNN(LatentModel):
    """L-ODE-RNN: the encoder is a GRU over time gaps, values and which of them were observed."""

    def __init__(self, config: LatentODEConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.gru = nn.GRU(2 * c.channels + 1, c.hidden, batch_first=True)
        self.to_initial = MLP(c.hidden, 50, 2 * c.latents, 2, nn.Tanh)

    def initial(self, series: Series) -> Float[Tensor, "b two_l"]:
        """From the state after the last point of `series`, the first in time."""
        inputs = torch.cat([series.gaps[..., None], series.values, series.flags], dim=-1)
        return self.to_initial(_last(self.gru(inputs)[0], series))


class LatentODE(LatentModel):
    """L-ODE-ODE: the encoder is an ODE-RNN."""

    def __init__(self, config: LatentODEConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.recurrence = ODERecurrence(c.channels, c.hidden, c.encoder_layers, c.units, c.gru_units, 1)
        self.to_initial = MLP(2 * c.hidden, 100, 2 * c.latents, 2, nn.Tanh)

    def initial(self, series: Series) -> Float[Tensor, "b two_l"]:
        """From mean and spread of the state after the last point of `series`, the first in time."""
        return self.to_initial(_last(self.recurrence(series), series))


def _last(states: Float[Tensor, "b n d"], series: Series) -> Float[Tensor, "b d"]:
    return pick(states, series.lengths[:, None])[:, 0]


def _repeated(value: Any, times: int) -> Any:
    """A dataclass of tensors with all rows repeated."""
    if times == 1:
        return value
    changes: dict[str, Any] = {}
    for name, part in vars(value).items():
        if isinstance(part, Tensor):
            changes[name] = part.repeat(times, *[1] * (part.dim() - 1))
        elif isinstance(part, Series):
            changes[name] = _repeated(part, times)
    return replace(value, **changes)
