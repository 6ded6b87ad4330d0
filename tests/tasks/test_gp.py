"""GP regression: the protocol, the kernels, and the exact posterior as a ceiling."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from retreever.batch import Batch
from retreever.errors import InputError
from retreever.tasks.gp import KERNELS, NOISE, GPTask, Hyperparameters, Kernel


def draws(task: GPTask, count: int) -> list[tuple[Batch, Hyperparameters]]:
    generator = task.training(0)
    return [task.draw(16, generator) for _ in range(count)]


def test_sizes_points_and_hyperparameters_follow_the_protocol() -> None:
    found = draws(GPTask(), 300)
    sizes = [(batch.xc.shape[1], batch.xt.shape[1]) for batch, _ in found]
    assert min(n for n, _ in sizes) == 3 and max(n for n, _ in sizes) == 46
    assert all(3 <= m <= 49 - n for n, m in sizes)
    for batch, hyper in found[:50]:
        batch.validate()
        assert all(bool((x.diff(dim=1) >= 0).all()) for x in (batch.xc, batch.xt))
        assert bool((batch.xc.abs() <= 2).all())
        assert bool(((hyper.length >= 0.1) & (hyper.length < 0.6)).all())
        assert bool(((hyper.scale >= 0.1) & (hyper.scale < 1.0)).all())
    assert bool((draws(GPTask(ranges="paper"), 1)[0][1].length >= 0.6).all())


@pytest.mark.parametrize(("kernel", "score"), [("rbf", 1.51), ("matern", 1.12)])
def test_the_exact_posterior_scores_what_is_known(kernel: Kernel, score: float) -> None:
    """1.51 and 1.12 with a standard error of 0.01 over 3,000 random batches; our sizes are spread evenly."""
    assert abs(GPTask(kernel, test_batches=1_000).oracle_scores().mean() - score) < 0.02


@pytest.mark.parametrize("kernel", KERNELS)
def test_posterior_equals_conditioning_the_joint_normal(kernel: Kernel) -> None:
    """Against the textbook formula with an explicit inverse, for every function."""
    task = GPTask(kernel)
    batch, hyper = task.draw(4, task.training(3))
    dist = task.posterior(batch, hyper)
    n = batch.xc.shape[1]
    x = torch.cat([batch.xc, batch.xt], dim=1).double()
    joint = task.covariance(x, x, hyper) + NOISE**2 * torch.eye(x.shape[1])
    known, cross, wanted = joint[:, :n, :n], joint[:, n:, :n], joint[:, n:, n:]
    weights = cross @ known.inverse()
    assert torch.allclose(dist.mean, weights @ batch.yc.double(), atol=1e-7)
    assert torch.allclose(dist.variance[..., 0], (wanted - weights @ cross.mT).diagonal(dim1=1, dim2=2), atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_at_hand_computed_points(kernel: Kernel) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    value = GPTask(kernel).covariance(0 * one, 0.25 * one, Hyperparameters(0.5 * one, 2 * one, 0.3 * one))
    s = math.sqrt(5) * 0.5
    expected = {
        "rbf": 4 * math.exp(-0.125),
        "matern": 4 * (1 + s + s * s / 3) * math.exp(-s),
        "periodic": 4 * math.exp(-2 * (math.sin(math.pi * 0.25 / 0.3) / 0.5) ** 2),
    }
    assert math.isclose(float(value), expected[kernel], rel_tol=1e-12)


def test_values_have_the_variance_of_the_kernel() -> None:
    """The first value of 2,000 functions, over its standard deviation, is a standard normal."""
    task, size = GPTask(), 2_000
    batch, hyper = task.draw(size, task.training(1))
    standardised = batch.yc[:, 0, 0].double() / (hyper.scale[:, 0, 0] ** 2 + NOISE**2).sqrt()
    assert abs(float(standardised.mean())) < 4 / math.sqrt(size)
    assert abs(float(standardised.square().mean()) - 1) < 4 * math.sqrt(2 / size)


def test_training_validation_and_test_functions_never_coincide_and_repeat_exactly() -> None:
    task = GPTask(test_batches=3)
    fixed = [*task.validation(3), *task.test()]
    trained = [batch for seed in range(10) for batch in itertools.islice(_stream(task, seed), 3)]
    firsts = [float(batch.xc[0, 0, 0]) for batch in (*fixed, *trained)]
    assert len(set(firsts)) == len(firsts)
    for batch, again in zip(fixed, [*task.validation(3), *task.test()], strict=True):
        assert torch.equal(batch.yt, again.yt)


def _stream(task: GPTask, seed: int) -> itertools.starmap[Batch]:
    generator = task.training(seed)
    return itertools.starmap(task.sample, itertools.repeat((2, generator)))


@pytest.mark.parametrize("wrong", [{"kernel": "cosine"}, {"ranges": "wide"}, {"test_batches": 0}])
def test_impossible_tasks_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(wrong))}: expected "):
        GPTask(**wrong)  # type: ignore[arg-type]


def test_tasks_of_the_same_settings_share_one_copy_of_a_set() -> None:
    first, second = next(GPTask(test_batches=12).test()), next(GPTask(test_batches=12, sizes="each").test())
    assert first.xc is second.xc
    tasks = [GPTask(kernel, ranges, 12) for kernel in KERNELS for ranges in ("code", "paper")]
    assert len({float(next(task.test()).xc[0, 0, 0]) for task in tasks}) == len(tasks)
    longer = list(GPTask(test_batches=14).test())
    assert len(longer) == 14
    assert all(torch.equal(a.yc, b.yc) for a, b in zip(longer, GPTask(test_batches=12).test(), strict=False))
