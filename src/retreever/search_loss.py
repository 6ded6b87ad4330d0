"""`tree_loss`: the whole objective of a search in one call, for training loops of one's own.

    found = tca(query, tree, leaves=True)
    loss = tree_loss(found, loss_of(found.output), loss_of(found.leaves), reward_of(found.output), ...)
    loss.total.backward()

`ReTreever.loss` is made of the same call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_number, reject
from retreever.attention import TreeCrossAttention
from retreever.checks import check_float, check_mask, check_same, check_tensor
from retreever.detours import Detours, PerQuery, draw_detours, find_detours
from retreever.objective import Loss, ObjectiveConfig, gate_of, masked_mean, three_term_loss
from retreever.results import TreeCrossAttentionResult
from retreever.tree.value import Tree

Mean = Callable[[Tensor], Tensor]  # over all processes that train together
_USUAL = ObjectiveConfig()


def tree_loss(
    found: TreeCrossAttentionResult,
    task: PerQuery,
    leaves: PerQuery,
    reward: PerQuery | None = None,
    full_reward: PerQuery | None = None,
    *,
    mask: Bool[Tensor, "b m"] | None = None,
    config: ObjectiveConfig = _USUAL,
    chance: float | None = None,
    detours: Detours | None = None,
    masses: PerQuery | None = None,
    mean: Mean | None = None,
) -> Loss:
    """The loss of a model with a tree search: `total` is to be minimised, the rest tells how it is made up.

    Tensors hold one value per query (b, m). Other shapes are refused: they would broadcast, and every reward would
    credit every path.

    Args:
        found: the search, made with `leaves=True`.
        task: loss of every query, predicted from `found.output`.
        leaves: the same loss, predicted from `found.leaves`.
        reward: what the search maximises, never differentiated; None takes `-task`.
        full_reward: the same reward of predictions from `found.leaves`, for the baseline "full" and for detours; None
            takes `-leaves`, if `reward` is None too.
        mask: True where a query is real; others count nowhere.
        config: weights of the terms, baseline, gate.
        chance: loss of a uniform guess, log(classes) for cross entropy. Given, the terms of the search are weighted by
            how far the loss over all leaves is below it (`config.gate`); None weights them by 1.
        detours: made by `search_with_detours`.
        masses: made by `mass_loss`, joins the policy term with the weight `config.lambda_mass`.
        mean: returns the mean of a tensor over all processes that train together.
    """
    _check(found, task, leaves, mask, config, chance)
    needs_full = config.baseline == "full" or detours is not None
    reward, full_reward = _rewards(task, leaves, reward, full_reward, needs_full)
    gate, weight = gates(config, task, leaves, mask, chance, mean)
    loss = three_term_loss(
        config,
        task=task,
        leaves=leaves,
        log_prob=found.log_prob,
        entropy=found.entropy / max(1, found.plan.depth),
        reward=reward,
        full_reward=full_reward,
        mask=mask,
        gate=gate,
        detours=None if detours is None else detours._replace(weight=detours.weight * weight),
    )
    if not config.lambda_mass:
        return loss
    if masses is None:
        reject("masses", "those of mass_loss, as lambda_mass is not 0", None)
    _check_per_query("masses", masses, task)
    taught = config.lambda_mass * masked_mean(masses, mask)
    return loss._replace(total=loss.total + gate * taught, policy=loss.policy + taught.detach())


def gates(
    config: ObjectiveConfig,
    task: PerQuery,
    leaves: PerQuery,
    mask: Bool[Tensor, "b m"] | None,
    chance: float | None,
    mean: Mean | None = None,
) -> tuple[Tensor | float, Tensor | float]:
    """Weight of the search in the loss, the same in all processes, and weight of a detour of each query.

    A detour is weighted by the progress of its query over all leaves and by that of the search: at chance level,
    imitating random decisions would make all children equally likely.
    """
    if chance is None or config.gate == "open" or not config.lambda_ca:
        return 1.0, 1.0
    means = torch.stack([masked_mean(loss.detach(), mask) for loss in (leaves, task)])
    gate, progress = gate_of(means if mean is None else mean(means), chance).unbind()
    return gate, progress * gate_of(leaves, chance)


def search_with_detours(
    tca: TreeCrossAttention,
    query: Float[Tensor, "b m d"],
    tree: Tree,
    share: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[TreeCrossAttentionResult, Detours | None]:
    """`tca(query, tree, leaves=True)` in which a `share` of the queries makes one decision at random, for `tree_loss`.

    Detours let a search unlearn wrong choices it is certain of (detours.py). There are none in a tree without
    decisions. `tree_loss` needs the same share as `ObjectiveConfig(detours=share)`.
    """
    check_number("share", share, below=1.0)
    drawn = generator or torch.Generator(query.device).manual_seed(int(torch.randint(2**31, ())))
    b, m = query.shape[:2]
    plan = tree.plan
    choices: Int[Tensor, "b m depth"] = draw_detours(b, m, plan.depth, plan.branch, share, drawn, query.device)
    found = tca(query, tree, choices=choices, generator=generator, leaves=True)
    return found, find_detours(tca.block.start(query)[1], tree, found.path, choices, 1.0)


def _rewards(
    task: PerQuery, leaves: PerQuery, reward: PerQuery | None, full_reward: PerQuery | None, needs_full: bool
) -> tuple[PerQuery, PerQuery]:
    """The rewards that are given, or follow from the losses, without gradients."""
    reward, full_reward = _as_floats(reward, task), _as_floats(full_reward, task)
    if reward is None:
        if full_reward is not None:
            reject("reward", "the rewards of the search, as full_reward is given", None)
        reward, full_reward = -task.detach(), -leaves.detach()
    _check_per_query("reward", reward, task)
    if full_reward is None:
        if needs_full:
            reject("full_reward", "rewards over all leaves, for the baseline 'full' and for detours", None)
        full_reward = torch.zeros_like(reward)
    _check_per_query("full_reward", full_reward, task)
    return reward.detach().to(task.dtype), full_reward.detach().to(task.dtype)


def _as_floats(reward: Tensor | None, task: Tensor) -> Tensor | None:
    """Rewards that are right or wrong, or counts, as numbers."""
    if not isinstance(reward, Tensor) or reward.dtype.is_floating_point or reward.is_complex():
        return reward
    return reward.to(task.dtype)


def _check(
    found: TreeCrossAttentionResult,
    task: Tensor,
    leaves: Tensor,
    mask: Tensor | None,
    config: ObjectiveConfig,
    chance: float | None,
) -> None:
    if not isinstance(found, TreeCrossAttentionResult):
        reject("found", "the result of a TreeCrossAttention", type(found).__name__)
    if found.leaves is None:
        reject("found", "a search with leaves=True, which also reads all leaves", "one without")
    if not isinstance(config, ObjectiveConfig):
        reject("config", "an ObjectiveConfig", type(config).__name__)
    for name, value in (("task", task), ("leaves", leaves)):
        _check_per_query(name, value, found.log_prob)
    if mask is not None:
        check_mask("mask", mask, "b m", b=task.shape[0], m=task.shape[1])
        check_same("mask", mask, "task", task, dtype=False)
    if chance is not None:
        check_number("chance", chance)
        if not chance:
            reject("chance", "the loss of a uniform guess, more than 0", chance)


def _check_per_query(name: str, value: Tensor, like: Tensor) -> None:
    b, m = like.shape
    check_tensor(name, value, "b m", b=b, m=m)
    check_float(name, value)
    check_same(name, value, "the search", like, dtype=False)
