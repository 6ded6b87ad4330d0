"""ODE-RNN (Rubanova et al. 2019): between points the state follows an ODE, at points a gated unit updates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_int
from retreever.checks import values_readable
from retreever.models.series.base import Memory, SeriesConfig, SeriesModel, answer_head, elapsed_since
from retreever.models.series.observed import Series, Times, pick
from retreever.models.series.ode import euler
from retreever.nn.blocks import MLP


@dataclass(frozen=True)
class ODERNNConfig(SeriesConfig):
    """Settings of ODE-RNN. The sizes are those of the encoder of the published latent ODE on Human Activity.

    Attributes:
        layers: layers of the ODE's net beyond its first and last.
        units: their width.
        gru_units: width of the hidden layers of the gates.
        steps: Euler steps between two points.
    """

    hidden: int = 100
    layers: int = 4
    units: int = 500
    gru_units: int = 50
    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("layers", self.layers, 0)
        for name in ("units", "gru_units", "steps"):
            check_int(name, getattr(self, name), 1)


class ODERecurrence(nn.Module):
    """Runs over a series; the state is a mean, which the ODE moves, and a spread, which it does not."""

    def __init__(self, channels: int, state: int, layers: int, units: int, gru_units: int, steps: int) -> None:
        super().__init__()
        self.state, self.steps = state, steps
        self.field = ode_net(state, layers, units)
        width = 2 * state + 2 * channels
        self.gates = MLP(width, 2 * gru_units, 2 * state, 2, nn.Tanh)  # update and reset
        self.candidate = MLP(width, gru_units, 2 * state, 2, nn.Tanh)

    def move(self, mean: Float[Tensor, "*b d"], span: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b d"]:
        """The mean after the time `span` without a point."""
        return euler(self.field, mean, span, self.steps)

    def update(
        self,
        mean: Float[Tensor, "b d"],
        spread: Float[Tensor, "b d"],
        point: Float[Tensor, "b i"],
        seen: Bool[Tensor, "b 1"],
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
        """The state after a point; nothing changes where nothing was observed."""
        gates = self.gates(torch.cat([mean, spread, point], dim=-1)).sigmoid()
        keep, reset = gates.masked_fill(~seen, 1).chunk(2, dim=-1)
        fresh = self.candidate(torch.cat([mean * reset, spread * reset, point], dim=-1))
        new_mean, new_spread = fresh.chunk(2, dim=-1)
        return (1 - keep) * new_mean + keep * mean, (1 - keep) * new_spread.abs() + keep * spread

    def forward(self, series: Series) -> Float[Tensor, "b n two_d"]:
        points = torch.cat([series.values, series.flags], dim=-1)
        seen = series.observed.any(dim=-1, keepdim=True)
        mean = spread = points.new_zeros(len(points), self.state)
        states = []
        for step, gap in enumerate(series.gaps[..., None].unbind(dim=1)):
            mean, spread = self.update(self.move(mean, gap), spread, points[:, step], seen[:, step])
            states.append(torch.cat([mean, spread], dim=-1))
        return torch.stack(states, dim=1)


class ODERNN(SeriesModel):
    """A classifier or regressor on the mean of the state, which moves on from the last point to the asked time."""

    config: ODERNNConfig
    settings = ODERNNConfig

    def __init__(self, config: ODERNNConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        self.recurrence = ODERecurrence(c.channels, c.hidden, c.layers, c.units, c.gru_units, c.steps)
        self.head = answer_head(c, c.hidden, 300, 3)

    def summarise(self, series: Series) -> Memory:
        """States after every point."""
        return Memory(series, self.recurrence(series)[..., : self.config.hidden])

    def features(self, memory: Memory, asked: Times) -> Float[Tensor, "b m d"]:
        """The last state, moved on by the ODE; not at all at the series' own times, which halves a step on a CPU."""
        state, elapsed = pick(memory.states, memory.series.until(asked)), elapsed_since(memory, asked)
        if asked.device.type == "cpu" and values_readable(asked) and not (elapsed.requires_grad or elapsed.any()):
            return state
        return self.recurrence.move(state, elapsed[..., None])


def ode_net(width: int, layers: int, units: int) -> MLP:
    """f of dz/dt = f(z): linear layers with tanh between, `layers` of them beyond the first and the last."""
    return MLP(width, units, width, layers + 2, nn.Tanh)
