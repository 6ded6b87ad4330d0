"""`tree_loss`: the terms by hand, what is refused, and a loop of one's own that learns by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import InputError, ObjectiveConfig, TreeCrossAttention, search_with_detours, tree_loss
from retreever.results import TreeCrossAttentionResult

B, M, N, DIM = 2, 3, 9, 16


def searched(leaves: bool = True) -> TreeCrossAttentionResult:
    torch.manual_seed(0)
    tca = TreeCrossAttention(DIM, heads=2)
    return tca(torch.randn(B, M, DIM), tca.build(torch.randn(B, N, DIM)), leaves=leaves)


FOUND = searched()


def per_query(seed: int) -> Tensor:
    return torch.rand(B, M, generator=torch.Generator().manual_seed(seed))


def terms() -> dict[str, Tensor]:
    return {name: per_query(i) for i, name in enumerate(("task", "leaves", "reward", "full_reward"))}


def test_the_terms_by_hand() -> None:
    """task + rl * (-(log_prob * (reward - full reward)) - alpha * entropy per decision) + ca * leaves."""
    t = terms()
    loss = tree_loss(FOUND, **t, config=ObjectiveConfig(lambda_rl=2.0, lambda_ca=0.5, alpha=0.1))
    decisions = FOUND.plan.depth
    policy = -(FOUND.log_prob * (t["reward"] - t["full_reward"])).mean() - 0.1 * (FOUND.entropy / decisions).mean()
    torch.testing.assert_close(loss.total, t["task"].mean() + 2 * policy + 0.5 * t["leaves"].mean())
    assert not loss.policy.requires_grad and loss.total.requires_grad


def test_a_weight_of_masses_needs_masses() -> None:
    t = terms()
    with pytest.raises(InputError, match=r"^masses: expected those of mass_loss, as lambda_mass is not 0"):
        tree_loss(FOUND, **t, config=ObjectiveConfig(lambda_mass=0.2))
    taught = tree_loss(FOUND, **t, config=ObjectiveConfig(lambda_mass=0.2), masses=per_query(9))
    torch.testing.assert_close(taught.total, tree_loss(FOUND, **t).total + 0.2 * per_query(9).mean())


def test_without_rewards_the_search_maximises_minus_the_loss() -> None:
    t = terms()
    usual = tree_loss(FOUND, t["task"], t["leaves"])
    given_ = tree_loss(FOUND, t["task"], t["leaves"], -t["task"], -t["leaves"])
    torch.testing.assert_close(usual, given_)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_rewards_may_be_right_or_wrong_or_counts(dtype: torch.dtype) -> None:
    t = terms()
    right = torch.tensor([[1, 0, 1], [0, 0, 1]])
    rewards = {"reward": right, "full_reward": 1 - right}
    found, wanted = (
        tree_loss(FOUND, **t | {k: v.to(kind) for k, v in rewards.items()}) for kind in (dtype, t["task"].dtype)
    )
    torch.testing.assert_close(found, wanted)


def test_masked_queries_count_nowhere() -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    clean = tree_loss(FOUND, **terms(), mask=mask)
    spoilt = {name: value.masked_fill(~mask, torch.nan) for name, value in terms().items()}
    torch.testing.assert_close(tree_loss(FOUND, **spoilt, mask=mask), clean)


def test_the_gate_closes_at_chance_and_opens_below_it() -> None:
    t = terms() | {"leaves": torch.full((B, M), 2.0)}
    shut, open_ = (tree_loss(FOUND, **t, chance=chance) for chance in (2.0, None))
    torch.testing.assert_close(shut.total, t["leaves"].mean())
    half = tree_loss(FOUND, **t, chance=4.0)
    torch.testing.assert_close(half.total - 2.0, (open_.total - 2.0) / 2)


SHAPES = [(B, M, 1), (B * M,), (M, B), (1, M), (B, 1), (B,), ()]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["task", "leaves", "reward", "full_reward", "mask"]), st.sampled_from(SHAPES))
def test_another_shape_is_refused_and_never_broadcast(name: str, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape, dtype=torch.bool) if name == "mask" else torch.ones(shape)
    with pytest.raises(InputError, match=rf"^{name}: expected shape \(b={B}, m={M}\)"):
        tree_loss(FOUND, **terms() | {name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"found": None}, "found: expected the result of a TreeCrossAttention"),
        ({"found": searched(leaves=False)}, "found: expected a search with leaves=True"),
        ({"task": 1.0}, "task: expected a tensor"),
        ({"leaves": torch.ones(B, M, dtype=torch.int64)}, "leaves: expected a floating point"),
        ({"full_reward": None}, "full_reward: expected rewards over all leaves"),
        ({"reward": None}, "reward: expected the rewards of the search"),
        ({"mask": torch.ones(B, M)}, "mask: expected dtype torch.bool"),
        ({"chance": 0.0}, "chance: expected the loss of a uniform guess"),
        ({"config": {}}, "config: expected an ObjectiveConfig"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        tree_loss(**{"found": FOUND, **terms()} | changed)


def test_detours_are_made_and_learned_from() -> None:
    torch.manual_seed(0)
    tca = TreeCrossAttention(DIM, heads=2)
    query, tree = torch.randn(4, 50, DIM), tca.build(torch.randn(4, N, DIM))
    found, detours = search_with_detours(tca, query, tree, 0.5, torch.Generator().manual_seed(0))
    assert detours is not None and 0.3 < float(detours.taken.float().mean()) < 0.7
    ones = torch.ones(4, 50)
    config = ObjectiveConfig(detours=0.5, baseline="none", alpha=0.0)
    loss = tree_loss(found, ones, ones, ones, ones, config=config, detours=detours)
    (grad,) = torch.autograd.grad(loss.total, tca.block.to_q.weight)
    assert float(loss.detours) > 0 and bool(grad.any())
    same = search_with_detours(tca, query, tree, 0.5, torch.Generator().manual_seed(0))[0]
    assert torch.equal(found.path, same.path)


def test_a_loop_by_hand_learns_where_to_look() -> None:
    """One token of 32 carries a mark and the label; the search has to find it."""
    torch.manual_seed(0)
    tca, label = TreeCrossAttention(DIM, heads=2), torch.nn.Linear(DIM, 2)
    optimiser = torch.optim.Adam([*tca.parameters(), *label.parameters()], 5e-3)
    right = torch.zeros(())
    for _ in range(60):
        where, truth = torch.randint(32, (64, 1)), torch.randint(2, (64, 1))
        context = 0.1 * torch.randn(64, 32, DIM)
        context[torch.arange(64), where[:, 0], :2] += 3 * torch.nn.functional.one_hot(truth[:, 0], 2)
        found = tca(torch.ones(64, 1, DIM), tca.build(context), leaves=True)
        logits, full = (label(part) for part in (found.output, found.leaves))
        losses = [
            torch.nn.functional.cross_entropy(part[:, 0], truth[:, 0], reduction="none") for part in (logits, full)
        ]
        loss = tree_loss(found, *(part[:, None] for part in losses), chance=math.log(2))
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
        right = (logits.argmax(dim=-1) == truth).float().mean()
    assert float(right) > 0.85
