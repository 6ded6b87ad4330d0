"""Rewards, REINFORCE and the three-term loss (paper, section 3.5). Pure functions on tensors.

    L = L_TCA + lambda_RL * L_RL + lambda_CA * L_CA
    L_RL = -mean(log_prob * (R - baseline)) - alpha * mean(entropy per decision)

With detours, a fourth term imitates those with a good reward (detours.py).

The paper writes L_RL as something to maximise yet adds it to a loss; here it is minimised. R is one number per query
and never differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.distributions import Categorical, Distribution

from retreever.arguments import check_choice, check_int, check_number, reject
from retreever.batch import without_padding
from retreever.detours import Detours, PerQuery, detour_credit
from retreever.nn.heads import log_likelihood, squared_error

Reward = Literal["log-likelihood", "squared-error", "cross-entropy", "accuracy"]
REWARDS: tuple[Reward, ...] = get_args(Reward)
Baseline = Literal["none", "constant", "batch-mean", "full"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
Gate = Literal["leaves", "open"]
GATES: tuple[Gate, ...] = get_args(Gate)
RewardFunction = Callable[[Distribution, Tensor], Tensor]


@dataclass(frozen=True)
class ObjectiveConfig:
    """Settings of the three-term loss.

    Attributes:
        reward: what the search maximises: "log-likelihood", "squared-error" (its negative), "cross-entropy" (its
            negative) or "accuracy"; None takes accuracy for classes, squared error for point predictions and
            log-likelihood for the rest.
        baseline: subtracted from the reward: "none", "constant" (`constant`), "batch-mean", or "full", the reward of
            the same query read over all leaves.
        constant: of the constant baseline.
        lambda_rl: weight of the policy term.
        lambda_ca: weight of the loss read over all leaves.
        alpha: weight of the entropy bonus inside the policy term.
        gate: "leaves" weights the terms of the search by the progress of the loss over all leaves: 1 - L_CA / chance
            where predictions are classes, 1 elsewhere, and the term of the detours also by 1 - L_TCA / chance; "open"
            always weights them by 1.
        detours: share of the queries that make one decision at random while training (see detours.py); none are made
            where `lambda_rl` is 0.
        lambda_mass: weight of `mass_loss`, by which attention over all tokens teaches the search where to look. With it
            `lambda_rl` can be 0; then training takes the most likely paths, as prediction does.
        budgets: largest budget in training: every second step reads a random number of tokens up to this instead of one
            path, or every step half of it to all of it where `lambda_rl` is 0; 0 always reads what the model is set to.
        share: of the queries for which all leaves are read too, and which train the search; fewer make steps faster.
    """

    reward: Reward | None = None
    baseline: Baseline = "full"
    constant: float = 0.0
    lambda_rl: float = 1.0
    lambda_ca: float = 1.0
    alpha: float = 0.01
    gate: Gate = "leaves"
    detours: float = 0.0
    lambda_mass: float = 0.0
    budgets: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.reward is not None:
            check_choice("reward", self.reward, REWARDS)
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("gate", self.gate, GATES)
        for name in ("lambda_rl", "lambda_ca", "alpha", "lambda_mass", "share"):
            check_number(name, getattr(self, name))
        check_int("budgets", self.budgets, 0)
        if not 0 < self.share <= 1:
            reject("share", "a share of the queries, more than 0 and at most 1", self.share)
        check_number("constant", self.constant, minimum=-math.inf)
        check_number("detours", self.detours, below=1.0)


class Loss(NamedTuple):
    """The loss and its parts, all scalars; parts a model does not have are 0."""

    total: Float[Tensor, ""]
    task: Float[Tensor, ""]
    policy: Float[Tensor, ""]
    leaves: Float[Tensor, ""]
    detours: Float[Tensor, ""]
    reward: Float[Tensor, ""]
    entropy: Float[Tensor, ""]

    @classmethod
    def only_task(cls, task: Float[Tensor, ""]) -> Loss:
        """The loss of a model without a search."""
        zero = torch.zeros_like(task).detach()
        alone = task.detach().clone()  # torch.compile cannot return two views of one tensor
        return cls(task, alone, *(zero for _ in cls._fields[2:]))


def reward_of(reward: Reward | RewardFunction, dist: Distribution, y: Shaped[Tensor, "b m *dy"]) -> PerQuery:
    """One reward per query, detached. `reward` may be any function (distribution, truth) -> (b, m).

    Outputs that are not known are NaN in `y`.
    """
    with torch.no_grad():
        value = REWARD_FUNCTIONS[reward](dist, y) if isinstance(reward, str) else reward(dist, y)
    if not isinstance(value, Tensor):
        reject("reward", f"a tensor of one value per query, shape {tuple(y.shape[:2])}", type(value).__name__)
    if value.shape != y.shape[:2]:
        reject("reward", f"one value per query, shape {tuple(y.shape[:2])}", tuple(value.shape))
    return value.detach() if value.is_floating_point() else value.to(torch.get_default_dtype())


def accuracy(dist: Distribution, y: Tensor) -> PerQuery:
    """1 where the most likely class is the true one, else 0."""
    if not isinstance(dist, Categorical):
        reject("reward", "a categorical prediction for accuracy", type(dist).__name__)
    return (dist.logits.argmax(dim=-1) == y).to(dist.logits.dtype)


REWARD_FUNCTIONS: dict[Reward, RewardFunction] = {
    "log-likelihood": log_likelihood,
    "squared-error": lambda dist, y: -squared_error(dist, y),
    "cross-entropy": lambda dist, y: dist.log_prob(y),
    "accuracy": accuracy,
}


def masked_means(terms: Float[Tensor, "k b m"], mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, " k"]:
    """Means of k terms over real queries; values at padding are ignored.

    Summed in two steps: compilers generate faster code for short sums, and triton 3.6 fails on long ones.
    """
    if mask is None:
        return terms.sum(dim=2).sum(dim=1) / max(1, terms[0].numel())
    return terms.masked_fill(~mask, 0).sum(dim=2).sum(dim=1) / mask.sum(dim=1).sum().clamp_min(1)


def masked_mean(values: PerQuery, mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, ""]:
    """Mean over real queries."""
    return masked_means(values[None], mask)[0]


def baseline_of(
    config: ObjectiveConfig, reward: PerQuery, full_reward: PerQuery, mask: Bool[Tensor, "b m"] | None
) -> Tensor:
    """The baseline to subtract from the reward; broadcasts against it."""
    if config.baseline == "constant":
        return reward.new_tensor(config.constant)
    if config.baseline == "batch-mean":
        return masked_mean(reward, mask)
    if config.baseline == "full":
        return full_reward
    return reward.new_zeros(())


def policy_terms(
    log_prob: PerQuery, advantage: PerQuery, mask: Bool[Tensor, "b m"] | None = None
) -> Float[Tensor, "b m"]:
    """REINFORCE loss of every query; `advantage` is reward minus baseline, of the shape of `log_prob`."""
    if advantage.shape != log_prob.shape:  # they would broadcast, and every reward would credit every path
        reject("advantage", f"the shape of log_prob {tuple(log_prob.shape)}", tuple(advantage.shape))
    credit = without_padding(advantage.detach(), mask)  # a NaN at padding would make the gradient 0 * NaN = NaN
    return -log_prob * credit


def gate_of(leaves: Float[Tensor, "*shape"], chance: float) -> Float[Tensor, "*shape"]:
    """Progress of reading all leaves, from 0 at chance to 1; `leaves` is its loss, `chance` that of a uniform guess.

    A search cannot find what attention over all tokens cannot yet tell apart. Until then its gradients are noise, and
    larger than those of the leaves, which share all weights.
    """
    return (1 - leaves.detach() / chance).clamp(0, 1)


def three_term_loss(
    config: ObjectiveConfig,
    task: PerQuery,
    leaves: PerQuery,
    log_prob: PerQuery,
    entropy: PerQuery,
    reward: PerQuery,
    full_reward: PerQuery,
    mask: Bool[Tensor, "b m"] | None = None,
    gate: Float[Tensor, ""] | float = 1.0,
    detours: Detours | None = None,
) -> Loss:
    """The loss of ReTreever from per-query parts; `entropy` is per decision, `gate` weights the terms of the search."""
    advantage = reward - baseline_of(config, reward, full_reward, mask)
    if detours is not None:
        advantage = advantage.masked_fill(detours.taken, 0)  # the policy did not choose this path
    terms = [task, leaves, policy_terms(log_prob, advantage, mask), entropy, reward.detach()]
    if detours is not None:
        credit = detours.weight * detour_credit(reward, full_reward)
        credit = credit.masked_fill(~detours.taken, 0) / config.detours  # the mean over queries with a detour
        terms.append(policy_terms(detours.log_prob, credit, mask))
    means = masked_means(torch.stack(terms), mask)
    policy = means[2] - config.alpha * means[3]
    imitation = means[5] if detours is not None else torch.zeros_like(policy)
    kept = means.detach()
    return Loss(
        total=gate * (means[0] + config.lambda_rl * policy + imitation) + config.lambda_ca * means[1],
        task=kept[0],
        policy=policy.detach(),
        leaves=kept[1],
        detours=imitation.detach(),
        reward=kept[4],
        entropy=kept[3],
    )
