"""Bayesian optimisation in one dimension: the functions, expected improvement, and how searches are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from retreever import InputError
from retreever.tasks.optimise import Functions, draw_functions, evaluations_to, expected_improvement, minimise


@pytest.fixture(scope="module")
def functions() -> Functions:
    return draw_functions(8, "rbf", seed=1)


def test_functions_are_draws_of_their_process(functions: Functions) -> None:
    """Near three of its points the exact posterior knows the function, and its standard deviation says how well."""
    index = torch.tensor([100, 110, 120]).expand(8, -1)
    x, y = functions.grid[index][..., None], functions.values.gather(1, index)[..., None]
    near = torch.arange(100, 121).expand(8, -1)
    dist = functions.posterior(x, y, functions.grid[near][..., None])
    z = (dist.mean[..., 0] - functions.values.gather(1, near)) / dist.stddev[..., 0]
    assert z.abs().mean() < 2 and dist.stddev.max() < 0.2
    again = draw_functions(8, "rbf", seed=1)
    assert torch.equal(again.values, functions.values) and torch.equal(again.start, functions.start)


def test_expected_improvement_is_the_mean_of_what_is_gained() -> None:
    mean, std, best = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.5, 2.0]]), torch.tensor([[0.1]])
    drawn = mean + std * torch.randn(400_000, 1, 2, generator=torch.Generator().manual_seed(0))
    sampled = (best - drawn).clamp_min(0).mean(dim=0)
    assert torch.allclose(expected_improvement(mean, std, best), sampled, atol=0.01)


def test_a_player_that_knows_the_function_needs_two_evaluations(functions: Functions) -> None:
    def oracle(_x: Tensor, _y: Tensor, _grid: Tensor) -> Normal:
        return Normal(functions.values[..., None], torch.tensor(1e-6, dtype=torch.float64))

    regret = minimise(oracle, functions, 3)
    assert regret.shape == (8, 4) and bool((regret[:, 1:] == 0).all())
    assert evaluations_to(regret, torch.zeros(8, 1)).max() <= 2


def test_regret_never_grows_and_the_process_itself_finds_minima(functions: Functions) -> None:
    regret = minimise(functions.posterior, functions, 25)
    assert bool((regret.diff(dim=1) <= 0).all()) and bool((regret >= 0).all())
    assert regret[:, -1].median() < 0.02 < regret[:, 0].median()


def test_evaluations_are_counted_from_one_and_failures_as_one_more() -> None:
    regret = torch.tensor([[0.5, 0.2, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]])
    assert evaluations_to(regret, torch.full((3, 1), 0.1)).tolist() == [3, 4, 1]


def test_what_does_not_fit_is_named(functions: Functions) -> None:
    with pytest.raises(InputError, match="count"):
        draw_functions(0)
    with pytest.raises(InputError, match="steps: expected less than the 1000 points"):
        minimise(functions.posterior, functions, 1000)
