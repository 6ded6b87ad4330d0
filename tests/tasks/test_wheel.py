"""The wheel bandit: who pays what where, what a model is trained on, and how regret is counted."""

from __future__ import annotations

import math

import pytest
import torch

from retreever import InputError
from retreever.tasks.wheel import ARMS, CONTEXT, LARGE, TARGETS, Game, WheelTask, mean_rewards, points_in_disc


def test_each_quadrant_has_its_arm_outside_of_delta_and_the_safe_arm_inside() -> None:
    corner = math.sqrt(0.5)
    directions = torch.tensor([[corner, corner], [-corner, corner], [-corner, -corner], [corner, -corner]])
    outside = mean_rewards(0.96 * directions[None], torch.tensor([[0.95]]))[0]
    inside = mean_rewards(0.94 * directions[None], torch.tensor([[0.95]]))[0]
    assert outside.argmax(dim=1).tolist() == [1, 2, 3, 4] and bool((outside.max(dim=1).values == LARGE).all())
    assert inside.argmax(dim=1).tolist() == [0, 0, 0, 0]
    assert inside[0].tolist() == pytest.approx([1.2, 1, 1, 1, 1])


def test_contexts_fill_the_disc_evenly() -> None:
    radius = points_in_disc(1, 20_000, torch.Generator().manual_seed(0)).norm(dim=-1)
    assert radius.max() <= 1 and float((radius < 0.5).float().mean()) == pytest.approx(0.25, abs=0.01)


def test_training_hides_half_of_the_rewards_and_targets_none() -> None:
    task, generator = WheelTask(), WheelTask().training(0)
    batch = max((task.sample(4, generator).validate() for _ in range(9)), key=lambda batch: batch.xc.shape[1])
    assert CONTEXT / 2 < batch.xc.shape[1] <= CONTEXT and batch.yt.shape == (4, TARGETS, ARMS)
    safe = (batch.yc[..., 0] - 1.2).abs() < 0.25
    assert 0.5 < float(safe.float().mean()) < 0.65  # noise lies there too, at times
    assert bool(((batch.yt[..., 0] - 1.2).abs() < 0.3).all())


def test_padded_problems_hold_as_many_contexts_as_were_drawn_and_no_noise_in_targets() -> None:
    task, generator = WheelTask(context=40), torch.Generator().manual_seed(0)
    n, m, room = task.draw_sizes(generator)
    batch = task.sample_padded(3, generator, torch.tensor([n, m]), room).validate()
    assert batch.xc.shape == (3, 40, 2) and batch.context_mask.sum(dim=1).tolist() == [n, n, n]
    assert bool(batch.target_mask.all()) and bool(((batch.yt[..., 0] - 1.2).abs() < 0.3).all())
    assert {task.sample(1, generator).xc.shape[1] for _ in range(400)} == set(range(1, 41))


def test_the_best_player_has_no_regret_and_a_fixed_arm_all_of_it() -> None:
    game = Game(0.9, players=3, steps=400)
    for step in range(400):
        game.play(step, game.means[:, step].argmax(dim=1))
    assert game.regret().cumulative.tolist() == [0, 0, 0]
    for step in range(400):
        game.play(step, game.means[:, step].argmin(dim=1))
    assert bool((game.regret().cumulative > 100).all())


def test_uniform_play_is_the_yardstick() -> None:
    game, generator = Game(0.7, players=40, steps=500), torch.Generator().manual_seed(0)
    for step in range(500):
        game.play(step, torch.randint(ARMS, (40,), generator=generator))
    regret = game.regret()
    assert float(regret.cumulative.mean()) == pytest.approx(100, abs=2)
    assert float(regret.late.mean()) == pytest.approx(100, abs=4)


def test_players_see_the_reward_of_their_arm_alone_and_the_same_contexts_in_other_orders() -> None:
    game = Game(0.9, players=2, steps=8)
    before = game.history.clone()
    game.play(3, torch.tensor([0, 4]))
    assert torch.equal(game.history[0, 3, 1:], before[0, 3, 1:]) and torch.equal(game.history[:, 4:], before[:, 4:])
    assert game.history[1, 3, 4] == game.rewards[1, 3, 4]
    assert not torch.equal(game.x[0], game.x[1])
    assert torch.equal(game.x[0].sort(dim=0).values, game.x[1].sort(dim=0).values)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError, match="delta"):
        Game(1.0, players=1, steps=10)
    with pytest.raises(InputError, match="context"):
        WheelTask(context=0)
