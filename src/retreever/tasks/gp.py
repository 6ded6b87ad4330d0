"""GP regression (paper, section 4.2.1): predict values of functions drawn from a Gaussian process from given points.

Per batch the context has N ~ U{3..46} points and the target M ~ U{3..49-N}; length-scale and output scale are drawn per
function. The paper prints length-scales from U[0.6, 1.0); the code behind its numbers, and behind those of all methods
it compares with, draws from U[0.1, 0.6) and adds noise of standard deviation 0.02. That is the default here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from retreever.arguments import check_choice, check_int
from retreever.batch import Batch
from retreever.tasks.padding import LAWS, Law, Room, Sizes, balanced_sizes, context_sizes, divide, draw_sizes, rooms_for
from retreever.tasks.seeds import stream

Kernel = Literal["rbf", "matern", "periodic"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
Ranges = Literal["code", "paper"]
NOISE = 0.02
MOST_POINTS = 50
ROOMS = rooms_for(MOST_POINTS, (16, 32, MOST_POINTS - 4))
EACH = Room(MOST_POINTS - 4, 24)
FUNCTIONS = 16  # in a batch of a fixed set


class Hyperparameters(NamedTuple):
    """Hyperparameters of a batch of functions, one of each per function."""

    length: Float[Tensor, "b 1 1"]
    scale: Float[Tensor, "b 1 1"]
    period: Float[Tensor, "b 1 1"]


Drawn = tuple[Batch, Hyperparameters]


@dataclass(frozen=True)
class GPTask:
    """Functions of one kernel.

    `sizes` says how many points training functions have: one number for a "batch", as in the paper, or one for "each"
    function, with 24 targets.
    """

    kernel: Kernel = "rbf"  # what the paper trains on; "matern" is 5/2
    ranges: Ranges = "code"  # of the length-scale: those of the public code, or those printed in the paper
    test_batches: int = 3_000  # batches of 16 functions in the test set
    sizes: Law = "batch"

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("ranges", self.ranges, ("code", "paper"))
        check_int("test_batches", self.test_batches, 1)
        check_choice("sizes", self.sizes, LAWS)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """`size` fresh functions."""
        if self.sizes == "batch":
            return self.draw(size, generator, device)[0]
        check_int("size", size, 1)
        n, m, room = self.draw_sizes(generator)
        return self.sample_padded(size, generator, torch.tensor([n, m], device=generator.device), room).to(device)

    def draw(
        self,
        size: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        sizes: tuple[int, int] | None = None,
    ) -> tuple[Batch, Hyperparameters]:
        """Fresh functions, all of one size, and their hyperparameters. Points are sorted, in leaf order.

        `sizes` are the numbers of context and target points; None draws them.
        """
        check_int("size", size, 1)
        n, m = sizes or draw_sizes(MOST_POINTS, ROOMS, generator)[:2]
        hyper = self._hyperparameters(size, generator)
        x = 4 * torch.rand(size, n + m, 1, **_where(generator)) - 2
        x = torch.cat([x[:, :n].sort(dim=1).values, x[:, n:].sort(dim=1).values], dim=1)
        y = self._values(x, hyper, generator)
        x, y = x.to(device, torch.float32), y.to(device, torch.float32)
        moved = Hyperparameters(*(value.to(device) for value in hyper))
        return Batch(xc=x[:, :n], yc=y[:, :n], xt=x[:, n:], yt=y[:, n:]), moved

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """Numbers of points for a batch, and the room they need."""
        return draw_sizes(MOST_POINTS, ROOMS, generator) if self.sizes == "batch" else Sizes(*EACH, EACH)

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Int64[Tensor, " 2"], room: Room) -> Batch:
        """Same as `sample`, on the generator's device, padded to `room` and masked."""
        per_task = self.sizes == "each"
        hyper = self._hyperparameters(size, generator)
        n = context_sizes(MOST_POINTS, size, generator) if per_task else sizes[0]
        m = sizes[1]
        points = sum(room) if per_task else min(MOST_POINTS - 1, sum(room))
        x = 4 * torch.rand(size, points, 1, **_where(generator)) - 2
        slot = torch.arange(points, device=x.device)
        part = 8 * ((slot >= n).double() + (slot >= n + m))[..., None]  # context, target, neither
        x = (x + part).sort(dim=1).values - part
        y = self._values(x, hyper, generator)
        return divide(x.float(), y.float(), n, m, room)

    def _hyperparameters(self, size: int, generator: torch.Generator) -> Hyperparameters:
        u = torch.rand(3, size, 1, 1, **_where(generator))
        low, width = (0.1, 0.5) if self.ranges == "code" else (0.6, 0.4)
        return Hyperparameters(low + width * u[0], 0.1 + 0.9 * u[1], 0.1 + 0.4 * u[2])

    def _values(self, x: Tensor, hyper: Hyperparameters, generator: torch.Generator) -> Tensor:
        """Noisy function values at `x`."""
        root, _ = torch.linalg.cholesky_ex(with_noise(self.covariance(x, x, hyper)))  # a check would wait for the GPU
        return root @ torch.randn(x.shape, **_where(generator))

    def covariance(
        self, x: Float[Tensor, "b n 1"], z: Float[Tensor, "b m 1"], hyper: Hyperparameters
    ) -> Float[Tensor, "b n m"]:
        """Prior covariance between points, without noise."""
        gap = (x - z.mT).abs()
        if self.kernel == "matern":
            d = math.sqrt(5) * gap / hyper.length
            return hyper.scale**2 * (1 + d + d.square() / 3) * (-d).exp()
        if self.kernel == "periodic":
            return hyper.scale**2 * (-2 * ((math.pi * gap / hyper.period).sin() / hyper.length).square()).exp()
        return hyper.scale**2 * (-0.5 * (gap / hyper.length).square()).exp()

    def posterior(self, batch: Batch, hyper: Hyperparameters) -> Distribution:
        """The exact predictive distribution at the targets given the true hyperparameters: the best possible."""
        xc, yc, xt = batch.xc.double(), batch.yc.double(), batch.xt.double()
        root = torch.linalg.cholesky(with_noise(self.covariance(xc, xc, hyper)))
        cross = torch.linalg.solve_triangular(root, self.covariance(xc, xt, hyper), upper=False)  # (b, n, m)
        mean = cross.mT @ torch.linalg.solve_triangular(root, yc, upper=False)
        variance = hyper.scale[..., 0] ** 2 + NOISE**2 - cross.square().sum(dim=1)  # (b, m)
        return Independent(Normal(mean, variance.clamp_min(NOISE**2).sqrt()[..., None], validate_args=False), 1)

    def training(self, seed: int) -> torch.Generator:
        """The generator of the training functions of `seed`."""
        return stream(self._name, "train", seed)

    def validation(self, batches: int = 100) -> Iterator[Batch]:
        """Fixed functions for validation; never trained on, never tested on."""
        return (batch for batch, _ in self._fixed("validation", batches))

    def test(self) -> Iterator[Batch]:
        """The fixed test set: 3,000 batches of 16 by default."""
        return (batch for batch, _ in self._fixed("test", self.test_batches))

    def oracle_scores(self) -> Float[Tensor, " batches"]:
        """The exact posterior's log-likelihood on every batch of the test set; their mean is the paper's measure."""
        fixed = self._fixed("test", self.test_batches)
        return torch.stack([self.metric(self.posterior(b, h), b).mean() for b, h in fixed])

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        """Log-likelihood of every target (b, m)."""
        return dist.log_prob(batch.yt)

    @property
    def _name(self) -> str:
        return f"gp-{self.kernel}-{self.ranges}"

    def _fixed(self, purpose: Literal["validation", "test"], batches: int) -> tuple[Drawn, ...]:
        return _fixed_set(GPTask(self.kernel, self.ranges), purpose, batches)


@lru_cache(maxsize=16)
def _fixed_set(task: GPTask, purpose: Literal["validation", "test"], batches: int) -> tuple[Drawn, ...]:
    """The first `batches` of a fixed set, cached for tasks of the same settings: 3,000 batches take seconds to draw."""
    generator = stream(task._name, purpose, 0)
    sizes = balanced_sizes(MOST_POINTS, generator)
    return tuple(task.draw(FUNCTIONS, generator, sizes=next(sizes)) for _ in range(batches))


def _where(generator: torch.Generator) -> dict[str, Any]:
    return {"generator": generator, "device": generator.device, "dtype": torch.float64}


def with_noise(covariance: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """The covariance of noisy observations."""
    return covariance + NOISE**2 * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
