"""The wheel bandit: five arms, contexts in the unit disc, and a large reward near its rim (Riquelme et al., 2018).

Arm 0 pays about 1.2 everywhere, the others 1.0. Outside of radius delta, the arm of the quadrant pays 50. The closer
delta is to 1, the rarer the large reward and the more a model has to explore. A model sees contexts (x1, x2) with the
rewards of five arms as values, of which a player knows only that of the arm it played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import check_int, reject
from retreever.batch import Batch
from retreever.tasks.padding import Room, Sizes, divide
from retreever.tasks.seeds import integer, stream

ARMS, LARGE, SAFE, OTHER = 5, 50.0, 1.2, 1.0
NOISE, NOISE_LARGE = 0.05, 0.01
CONTEXT, TARGETS = 512, 50
HIDDEN = 0.5  # share of the rewards in a training context that are replaced by noise
FIXED_BATCH = 8
Points = Float[Tensor, "b n 2"]
Rewards = Float[Tensor, "b n arms"]


def points_in_disc(b: int, n: int, generator: torch.Generator) -> Points:
    """Uniform in the unit disc."""
    radius, angle = torch.rand(2, b, n, generator=generator, device=generator.device)
    radius, angle = radius.sqrt(), 2 * torch.pi * angle
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def mean_rewards(x: Points, delta: Float[Tensor, "b 1"]) -> Rewards:
    """Expected reward of every arm."""
    right, up = x[..., 0] > 0, x[..., 1] > 0
    quadrant = torch.where(up, torch.where(right, 1, 2), torch.where(right, 4, 3))
    means = torch.full((*x.shape[:2], ARMS), OTHER, device=x.device)
    means[..., 0] = SAFE
    large = torch.where(x.norm(dim=-1) >= delta, LARGE, OTHER)
    return means.scatter(2, quadrant[..., None], large[..., None])


def draw_rewards(means: Rewards, generator: torch.Generator) -> Rewards:
    """Rewards of every arm, with noise."""
    noise = torch.randn(means.shape, generator=generator, device=generator.device)
    return means + noise * torch.where(means == LARGE, NOISE_LARGE, NOISE)


@dataclass(frozen=True)
class WheelTask:
    """Problems with delta uniform in [0, 1): 1 to 512 contexts, half of whose rewards are noise, and 50 targets.

    Every batch has fresh problems, all with as many contexts; the published code trains on eight fixed problems of 512
    contexts, and a player begins with one.
    """

    context: int = CONTEXT
    test_batches: int = 50

    def __post_init__(self) -> None:
        check_int("context", self.context, 1)
        check_int("test_batches", self.test_batches, 1)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """`size` fresh problems."""
        check_int("size", size, 1)
        n = self.draw_sizes(generator).n
        x, y = self._problems(size, n, n, generator)
        return Batch(x[:, :n], y[:, :n], x[:, n:], y[:, n:]).to(device)

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """Numbers of contexts and targets, and the room they need."""
        return Sizes(integer(1, self.context + 1, generator), TARGETS, Room(self.context, TARGETS))

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Int[Tensor, " 2"], room: Room) -> Batch:
        """Same as `sample`, on the generator's device, padded to `room` and masked."""
        x, y = self._problems(size, room.context, sizes[0], generator)
        return divide(x, y, sizes[0], sizes[1], room)

    def _problems(
        self, size: int, room: int, n: int | Int[Tensor, ""], generator: torch.Generator
    ) -> tuple[Points, Rewards]:
        """Points and rewards, of the first `n` points as players know them."""
        where: dict[str, Any] = {"generator": generator, "device": generator.device}
        x = points_in_disc(size, room + TARGETS, generator)
        y = draw_rewards(mean_rewards(x, torch.rand(size, 1, **where)), generator)
        asked = torch.arange(x.shape[1], device=x.device)[:, None] >= n
        known = asked | (torch.rand(y.shape, **where) >= HIDDEN)
        return x, torch.where(known, y, torch.randn(y.shape, **where))

    def training(self, seed: int) -> torch.Generator:
        """The generator of the training problems of `seed`."""
        return stream("wheel", "train", seed)

    def validation(self, batches: int = 8) -> Iterator[Batch]:
        """Fixed problems for validation; never trained on, never tested on."""
        generator = stream("wheel", "validation", 0)
        return (self.sample(FIXED_BATCH, generator) for _ in range(batches))

    def test(self) -> Iterator[Batch]:
        """Fixed problems for the log-likelihood; regret is measured by `play`."""
        generator = stream("wheel", "test", 0)
        return (self.sample(FIXED_BATCH, generator) for _ in range(self.test_batches))

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        """Log-likelihood of the five rewards of every target (b, m)."""
        return dist.log_prob(batch.yt)


class Regret(NamedTuple):
    """Regret of every player, in % of that of uniform play: over all steps, and over the last quarter of them."""

    cumulative: Float[Tensor, " players"]
    late: Float[Tensor, " players"]


class Game:
    """Players of one wheel at once, each with an own order of the same contexts and an own history.

    Rewards of arms that were not played are filled with noise, as in training.
    """

    def __init__(self, delta: float, players: int, steps: int, device: torch.device | str = "cpu") -> None:
        if not 0 < delta < 1:
            reject("delta", "a number between 0 and 1", delta)
        check_int("players", players, 1)
        check_int("steps", steps, 4)
        generator = stream(f"wheel-{delta:g}", "test", 0)
        x = points_in_disc(1, steps, generator)
        means = mean_rewards(x, torch.tensor([[delta]]))
        rewards = draw_rewards(means, generator)
        order = torch.stack([torch.randperm(steps, generator=generator) for _ in range(players)])
        fill = torch.randn(players, steps, ARMS, generator=generator)
        self.first = torch.randint(ARMS, (players,), generator=generator).to(device)
        self.x, self.means, self.rewards = (part[0][order].to(device) for part in (x, means, rewards))
        self.history = fill.to(device)  # rewards as the players know them
        self.played = torch.zeros(players, steps, dtype=torch.int64, device=device)

    def play(self, step: int, arm: Int[Tensor, " players"]) -> None:
        """Every player plays an arm at its context of that step, and sees its reward."""
        index = arm[:, None]
        self.played[:, step] = arm
        self.history[:, step] = self.history[:, step].scatter(1, index, self.rewards[:, step].gather(1, index))

    def regret(self) -> Regret:
        """Of all steps played: expected reward of the best arm minus that of the arm played."""
        lost = (self.means.max(dim=2).values - self.means.gather(2, self.played[..., None])[..., 0]).double()
        uniform = (self.means.max(dim=2, keepdim=True).values - self.means).double().mean(dim=2)
        late = slice(-(lost.shape[1] // 4), None)
        parts = [100 * lost[:, part].sum(dim=1) / uniform[:, part].sum(dim=1) for part in (slice(None), late)]
        return Regret(*parts)
