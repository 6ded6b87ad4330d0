"""Bayesian optimisation in one dimension, as the literature of neural processes does it.

Functions are draws of a Gaussian process on a grid. Starting at one random point, each step evaluates the function
where the expected improvement over the smallest value seen is largest, under the predictions of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import check_int, reject
from retreever.batch import Batch
from retreever.tasks.gp import GPTask, Hyperparameters, Kernel
from retreever.tasks.seeds import stream

GRID = 1_000
JITTER = 1e-6  # on the diagonal of the covariance of the grid
# (xc (b, n, 1), yc (b, n, 1), grid (b, g, 1)) -> predictions on the grid
Predict = Callable[[Tensor, Tensor, Tensor], Distribution]


@dataclass(frozen=True)
class Functions:
    """Functions to minimise: a grid, their values on it, where each search starts, and their hyperparameters."""

    grid: Float[Tensor, " g"]
    values: Float[Tensor, "b g"]
    start: Int[Tensor, " b"]
    hyper: Hyperparameters
    task: GPTask

    def posterior(self, xc: Tensor, yc: Tensor, xt: Tensor) -> Distribution:
        """Predictions of the Gaussian process the functions were drawn from: the best possible."""
        return self.task.posterior(Batch(xc, yc, xt, xt), self.hyper)


def draw_functions(count: int, kernel: Kernel = "rbf", seed: int = 0) -> Functions:
    """`count` functions with the hyperparameters of GP regression, on a grid of 1,000 points from -2 to 2."""
    check_int("count", count, 1)
    task, generator = GPTask(kernel), stream(f"optimise-{kernel}", "test", seed)
    grid = torch.linspace(-2, 2, GRID, dtype=torch.float64)
    x = grid[None, :, None].expand(count, -1, -1)
    hyper = task._hyperparameters(count, generator)
    covariance = task.covariance(x, x, hyper) + JITTER * torch.eye(GRID, dtype=torch.float64)
    noise = torch.randn(count, GRID, 1, generator=generator, dtype=torch.float64)
    values = (torch.linalg.cholesky(covariance) @ noise)[..., 0]
    return Functions(grid, values, torch.randint(GRID, (count,), generator=generator), hyper, task)


def expected_improvement(
    mean: Float[Tensor, "b g"], std: Float[Tensor, "b g"], best: Float[Tensor, "b 1"]
) -> Float[Tensor, "b g"]:
    """How much lower than `best` a value is, in expectation."""
    z = (best - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return std * (density + z * torch.special.ndtr(z))


@torch.no_grad()
def minimise(predict: Predict, functions: Functions, steps: int) -> Float[Tensor, "b evaluations"]:
    """Simple regret of every function after 1, 2, ... steps + 1 evaluations: smallest value seen minus minimum."""
    check_int("steps", steps, 1)
    grid, values = functions.grid, functions.values
    if steps >= len(grid):
        reject("steps", f"less than the {len(grid)} points of the grid", steps)
    count = len(values)
    seen: Bool[Tensor, "b g"] = torch.zeros_like(values, dtype=torch.bool)
    places = functions.start[:, None]
    everywhere = grid[None, :, None].expand(count, -1, -1)
    while places.shape[1] <= steps:
        seen.scatter_(1, places, True)
        y = values.gather(1, places)
        dist = predict(grid[places][..., None], y[..., None], everywhere)
        mean, std = (part[..., 0].double() for part in (dist.mean, dist.stddev))
        gain = expected_improvement(mean, std, y.min(dim=1, keepdim=True).values)
        following = gain.masked_fill(seen, -1.0).argmax(dim=1, keepdim=True)
        places = torch.cat([places, following], dim=1)
    found = values.gather(1, places).cummin(dim=1).values
    return found - values.min(dim=1, keepdim=True).values


def evaluations_to(regret: Float[Tensor, "b evaluations"], most: Float[Tensor, "b 1"]) -> Int[Tensor, " b"]:
    """Evaluations until the regret is at most `most`; one more than were made where it never was."""
    reached = regret <= most
    first = reached.to(torch.int8).argmax(dim=1) + 1
    return torch.where(reached.any(dim=1), first, regret.shape[1] + 1)
