"""The objective: arithmetic by hand, the sign of REINFORCE, its gradient against all paths, masked targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from retreever.errors import InputError
from retreever.objective import (
    BASELINES,
    Loss,
    ObjectiveConfig,
    Reward,
    RewardFunction,
    baseline_of,
    gate_of,
    masked_mean,
    policy_terms,
    reward_of,
    three_term_loss,
)
from retreever.ops.search.api import TreeAttention, tree_attention
from retreever.tree.plan import TreePlan

HEADS, WIDTH, CLASSES, SAMPLES = 2, 3, 4, 100_000
PLAN = TreePlan(16, branch=2)
MASK = torch.tensor([[True, True, False], [False, True, True]])


class Parts(NamedTuple):
    """Per-query parts of the loss, (2, 3) each."""

    task: Tensor
    leaves: Tensor
    log_prob: Tensor
    entropy: Tensor
    reward: Tensor
    full_reward: Tensor

    def loss(self, mask: Tensor | None = None, **settings: object) -> Loss:
        return three_term_loss(ObjectiveConfig(**settings), *self, mask)


def parts(seed: int = 0) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    return Parts(*torch.randn(6, 2, 3, generator=generator, dtype=torch.float64).unbind())


def gaussian(mean: Tensor) -> Distribution:
    return Independent(Normal(mean, torch.full_like(mean, 0.5)), 1)


def classes(logits: Tensor) -> Distribution:
    """Every output is one of a few classes."""
    return Independent(Categorical(logits=logits.unflatten(-1, (-1, CLASSES))), 1)


class Problem(NamedTuple):
    """One query, a random tree, and a fixed linear read-out of the answer."""

    q: Tensor
    keys: Tensor
    values: Tensor
    readout: Tensor
    truth: Tensor
    dist: Callable[[Tensor], Distribution]

    def walk(self, noise: Tensor) -> tuple[Tensor, TreeAttention]:
        """A leaf copy of the query per row of noise, so that every sample has a gradient of its own."""
        q = self.q.expand(1, len(noise), -1, -1).clone().requires_grad_()
        return q, tree_attention(q, self.keys, self.values, PLAN, None, noise[None], impl="reference")

    def reward(self, reward: Reward, found: TreeAttention) -> Tensor:
        answers = self.dist(found.output.detach().flatten(-2) @ self.readout)
        return reward_of(reward, answers, self.truth.expand(1, found.path.shape[1], *self.truth.shape))


def problem(reward: Reward, outputs: int) -> Problem:
    generator = torch.Generator().manual_seed(outputs)
    discrete = reward == "cross-entropy"

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Problem(
        q=draw(1, 1, HEADS, WIDTH),
        keys=1.5 * draw(1, PLAN.nodes, HEADS, WIDTH),
        values=draw(1, PLAN.nodes, HEADS, WIDTH),
        readout=draw(HEADS * WIDTH, outputs * (CLASSES if discrete else 1)),
        truth=torch.arange(outputs) % CLASSES if discrete else draw(outputs),
        dist=classes if discrete else gaussian,
    )


def noise_of_every_path(p: Problem) -> Tensor:
    """One row of noise per leaf block: sampled until each has been seen, so no policy is recomputed here."""
    noise = torch.rand(4000, PLAN.depth, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    path = p.walk(noise)[1].path[0]
    return torch.stack([noise[(path == block).nonzero()[0, 0]] for block in range(PLAN.blocks)])


def exact_gradient(p: Problem, reward: Reward) -> Tensor:
    """Gradient of the loss minus sum over paths of probability * reward, the reward held fixed."""
    q, found = p.walk(noise_of_every_path(p))
    probability = found.log_prob.exp()
    assert abs(float(probability.detach().sum()) - 1) < 1e-9
    (-(probability * p.reward(reward, found)).sum()).backward()
    return q.grad.sum(dim=1).flatten()


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("reward", ["log-likelihood", "cross-entropy", "squared-error"])
@pytest.mark.parametrize("baseline", ["none", "batch-mean"])
def test_reinforce_gradient_is_the_gradient_of_the_expected_reward(reward: Reward, outputs: int, baseline: str) -> None:
    """Mean over sampled paths within 4 standard errors of the gradient summed over all paths."""
    p = problem(reward, outputs)
    noise = torch.rand(SAMPLES, PLAN.depth, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, found = p.walk(noise)
    rewards = p.reward(reward, found)
    nothing = torch.zeros_like(rewards)
    config = ObjectiveConfig(reward=reward, baseline=baseline, alpha=0.0, lambda_ca=0.0)
    three_term_loss(config, nothing, nothing, found.log_prob, found.entropy, rewards, nothing).total.backward()
    samples = SAMPLES * q.grad.flatten(0, 1).flatten(1)  # the mean divided each by SAMPLES
    exact, error = exact_gradient(p, reward), samples.std(dim=0) / math.sqrt(SAMPLES)
    assert bool(((samples.mean(dim=0) - exact).abs() <= 4 * error).all())
    assert bool((exact.abs() > 8 * error).any())  # a gradient of the wrong sign or of 0 would be seen


@pytest.mark.parametrize("rewarded", range(PLAN.blocks))
def test_a_step_makes_a_rewarded_path_more_likely(rewarded: int) -> None:
    p = problem("log-likelihood", 1)
    noise = noise_of_every_path(p)[rewarded : rewarded + 1]
    q, found = p.walk(noise)
    nothing, one = torch.zeros(1, 1), torch.ones(1, 1)
    config = ObjectiveConfig(baseline="none", alpha=0.0)
    three_term_loss(config, nothing, nothing, found.log_prob, found.entropy, one, nothing).total.backward()
    stepped = p._replace(q=(q - 1e-3 * q.grad).detach())
    after = stepped.walk(noise)[1]
    assert after.path.tolist() == [[rewarded]]
    assert float(after.log_prob.detach()) > float(found.log_prob.detach())


def test_the_entropy_bonus_spreads_the_policy() -> None:
    p = problem("log-likelihood", 1)
    noise = torch.full((1, PLAN.depth), 0.5)
    q, found = p.walk(noise)
    nothing = torch.zeros(1, 1)
    config = ObjectiveConfig(baseline="none", alpha=1.0)
    three_term_loss(config, nothing, nothing, found.log_prob, found.entropy, nothing, nothing).total.backward()
    after = p._replace(q=(q - 1e-3 * q.grad).detach()).walk(noise)[1]
    assert float(after.entropy.detach()) > float(found.entropy.detach())


def test_three_terms_by_hand() -> None:
    """Two queries: advantages 2 and -1, so -mean(log_prob * advantage) = -(-1*2 + -3*-1)/2 = -0.5."""
    by_hand = Parts(*(torch.tensor([row]) for row in ([1.0, 3], [4.0, 6], [-1.0, -3], [0.2, 0.4], [3.0, 0], [9.0, 9])))
    loss = by_hand.loss(baseline="constant", constant=1.0, lambda_rl=2.0, lambda_ca=0.5, alpha=10.0)
    task, policy, leaves = 2.0, -0.5 - 10 * 0.3, 5.0
    expected = (task + 2 * policy + 0.5 * leaves, task, policy, leaves, 0.0, 1.5, 0.3)
    assert [float(part) for part in loss] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("baseline", "expected"), [("none", 0.0), ("constant", 0.7), ("batch-mean", 2.5), ("full", [[5.0, 6, 7, 8]])]
)
def test_baselines(baseline: str, expected: object) -> None:
    config = ObjectiveConfig(baseline=baseline, constant=0.7)
    reward, full = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[5.0, 6, 7, 8]])
    assert torch.equal(baseline_of(config, reward, full, None), torch.tensor(expected))
    masked = baseline_of(config, reward, full, torch.tensor([[True, False, True, False]]))
    assert torch.equal(masked, torch.tensor(2.0 if baseline == "batch-mean" else expected))


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_loss_uses_its_baseline(baseline: str) -> None:
    x = parts()
    advantage = {
        "none": x.reward,
        "constant": x.reward - 0.3,
        "batch-mean": x.reward - x.reward.mean(),
        "full": x.reward - x.full_reward,
    }[baseline]
    loss = x.loss(baseline=baseline, constant=0.3, alpha=0.1)
    torch.testing.assert_close(loss.policy, -(x.log_prob * advantage).mean() - 0.1 * x.entropy.mean())
    torch.testing.assert_close(loss.total, x.task.mean() + loss.policy + x.leaves.mean())


def test_only_the_total_carries_a_gradient() -> None:
    """And neither rewards nor baselines are differentiated, whatever they hang on."""
    x = Parts(*(part.requires_grad_() for part in parts()))
    loss = x.loss(baseline="full")
    loss.total.backward()
    assert x.reward.grad is None and x.full_reward.grad is None
    assert all(part.grad.any() for part in (x.task, x.leaves, x.log_prob, x.entropy))
    assert not any(part.requires_grad for part in (loss.task, loss.policy, loss.leaves, loss.entropy))


def test_a_model_without_search_has_a_task_loss_alone() -> None:
    task = torch.tensor(2.0, requires_grad=True)
    assert [float(part.detach()) for part in Loss.only_task(task)] == [2, 2, 0, 0, 0, 0, 0]
    assert Loss.only_task(task).total.requires_grad


def test_rewards_by_hand() -> None:
    mean, y = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), torch.tensor([[[1.0, 4.0], [3.0, 4.0]]])
    assert reward_of("squared-error", gaussian(mean), y).tolist() == [[-4.0, -25.0]]
    normal = -2 * math.log(0.5 * math.sqrt(2 * math.pi))
    assert reward_of("log-likelihood", gaussian(mean), y)[0].tolist() == pytest.approx([normal - 8, normal - 50])
    dist = Categorical(probs=torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]]))
    assert reward_of("accuracy", dist, torch.tensor([[0, 2]])).tolist() == [[1.0, 0.0]]
    cross_entropy = reward_of("cross-entropy", dist, torch.tensor([[0, 2]]))[0].tolist()
    assert cross_entropy == pytest.approx([math.log(0.7), math.log(0.3)])


@pytest.mark.parametrize("reward", ["log-likelihood", "squared-error", lambda dist, y: (dist.mean + y).sum(dim=-1)])
def test_rewards_are_one_detached_value_per_query(reward: Reward | RewardFunction) -> None:
    mean = torch.zeros(2, 3, 1, requires_grad=True)
    value = reward_of(reward, gaussian(mean), torch.ones(2, 3, 1))
    assert value.shape == (2, 3) and not value.requires_grad


@pytest.mark.parametrize("shape", [(2, 3, 1), (6,), (6, 1), (3, 2), (2,), ()])
def test_a_reward_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """A reward (b, m, 1) against log-probabilities (b*m,) would broadcast to every pair of queries."""
    with pytest.raises(InputError, match=r"^reward: expected one value per query, shape \(2, 3\)"):
        reward_of(lambda dist, y: torch.ones(shape), gaussian(torch.zeros(2, 3, 1)), torch.ones(2, 3, 1))


def test_an_advantage_that_would_broadcast_is_refused() -> None:
    """Regression: (2, 3, 1) times (6,) is (2, 3, 6), a mean over pairs of queries that looks like a loss."""
    with pytest.raises(InputError, match=r"^advantage: expected"):
        policy_terms(torch.ones(6), torch.ones(2, 3, 1))


@pytest.mark.parametrize("value", [1.0, None, [[1.0]]])
def test_a_reward_that_is_no_tensor_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=f"reward: expected a tensor .*, got {type(value).__name__}"):
        reward_of(lambda dist, y: value, gaussian(torch.zeros(2, 3, 1)), torch.ones(2, 3, 1))  # type: ignore[arg-type, return-value]


def test_rewards_of_one_dimension_do_not_mix_queries() -> None:
    """Regression, through the whole loss: query i's reward scales query i's log-probability and no other."""
    x = parts()
    log_prob = x.log_prob.clone().requires_grad_()
    mean, y = torch.zeros(2, 3, 1, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64).view(2, 3, 1)
    reward = reward_of("squared-error", gaussian(mean), y)
    x._replace(log_prob=log_prob, reward=reward).loss(baseline="none", alpha=0.0).total.backward()
    torch.testing.assert_close(log_prob.grad, y[..., 0].square() / 6)


def test_accuracy_needs_classes() -> None:
    with pytest.raises(InputError, match=r"^reward: expected a categorical prediction"):
        reward_of("accuracy", gaussian(torch.zeros(2, 3, 1)), torch.ones(2, 3, 1))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_masked_targets_do_not_change_the_loss(baseline: str, garbage: float) -> None:
    """It is the mean over real targets: the loss of those alone."""
    spoiled = Parts(*(part.masked_fill(~MASK, garbage) for part in parts()))
    alone = Parts(*(part[MASK][None] for part in parts()))
    for got, want in zip(spoiled.loss(MASK, baseline=baseline), alone.loss(baseline=baseline), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_rewards_of_masked_targets_leave_no_gradient(garbage: float) -> None:
    x = Parts(*(part.requires_grad_() for part in parts()))
    spoiled = x._replace(reward=x.reward.detach().masked_fill(~MASK, garbage))
    spoiled.loss(MASK, baseline="batch-mean").total.backward()
    for part in (x.task, x.leaves, x.log_prob, x.entropy):
        assert bool((part.grad[~MASK] == 0).all())
        assert bool(torch.isfinite(part.grad).all()) and bool(part.grad.any())


def test_a_mask_without_targets_gives_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert float(masked_mean(torch.full((2, 3), torch.nan), nothing)) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "f1"),
        ("baseline", "median"),
        ("lambda_rl", -1.0),
        ("lambda_ca", math.nan),
        ("alpha", -0.1),
        ("detours", 1.0),
    ],
)
def test_impossible_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^{name}: expected"):
        ObjectiveConfig(**{name: value})


@pytest.mark.parametrize(("leaves", "gate"), [(3.0, 0.0), (2.0, 0.0), (1.5, 0.25), (0.5, 0.75), (0.0, 1.0)])
def test_the_search_is_trained_as_far_as_the_leaves_have_come(leaves: float, gate: float) -> None:
    """At chance or worse the leaves learn alone; once they are read perfectly, the search counts in full."""
    assert gate_of(torch.tensor(leaves), chance=2.0).item() == pytest.approx(gate)
    opened, gated = parts().loss(), three_term_loss(ObjectiveConfig(), *parts(), gate=gate)
    search = opened.total - opened.leaves
    assert gated.total.item() == pytest.approx((gate * search + opened.leaves).item(), abs=1e-6)


def test_the_gate_carries_no_gradient() -> None:
    leaves = torch.tensor(1.0, requires_grad=True)
    assert not gate_of(leaves, chance=2.0).requires_grad
