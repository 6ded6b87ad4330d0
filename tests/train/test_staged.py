"""`fit_staged`: attention first, then the tree; what the second stage trains, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever import Batch, InputError, ObjectiveConfig, ReTreever, TransformerCA
from retreever.train import TrainConfig, evaluate, fit_staged
from retreever.train.staged import teaching

SIZES: dict[str, Any] = {"dim_x": 2, "dim": 16, "heads": 2, "hidden": 16, "encoder": "identity", "waves": 4}
CONFIG = TrainConfig(steps=10, batch=2, lr=1e-3, warmup=2, evaluate_every=5)


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 40, 2, generator=generator)
    y = x.sum(dim=-1, keepdim=True)
    return Batch(x[:, :33], y[:, :33], x[:, 33:], y[:, 33:])


def model() -> TransformerCA:
    torch.manual_seed(0)
    return TransformerCA(**SIZES)


def test_both_stages_train_and_the_history_runs_on() -> None:
    first = model()
    found, history = fit_staged(first, [batch()], CONFIG, first=0.5, budgets=9, learn="all", validation=[batch(1)])
    assert isinstance(found, ReTreever) and [record.step for record in history] == [5, 10]
    assert not torch.equal(first.attention.block.to_q.weight, model().attention.block.to_q.weight)
    assert not torch.equal(found.attention.block.to_q.weight, first.attention.block.to_q.weight)
    assert found.attention.correction is not None and bool(found.attention.correction.down.weight.any())
    assert found.config.objective.budgets == 9 and not found.capturable


def test_the_second_stage_keeps_what_attention_knows() -> None:
    """Only nodes learn: reading all tokens gives what attention gave, and all weights can be trained on afterwards."""
    first, data = model(), batch(2)
    found, _ = fit_staged(first, [batch()], CONFIG, first=0.5, budgets=9)
    assert found.attention.correction is not None and bool(found.attention.correction.down.weight.any())
    one, other = (
        first.eval().predict(data.xc, data.yc, data.xt),
        found.eval().predict(data.xc, data.yc, data.xt, budget=33),
    )
    torch.testing.assert_close(one.mean, other.mean, atol=1e-5, rtol=1e-5)
    assert all(weight.requires_grad for weight in found.parameters())


def test_without_a_second_stage_it_is_the_conversion() -> None:
    first = model()
    found, _ = fit_staged(first, [batch()], CONFIG, first=1.0)
    data = batch(2)
    one, other = (
        first.eval().predict(data.xc, data.yc, data.xt),
        found.eval().predict(data.xc, data.yc, data.xt, budget=33),
    )
    torch.testing.assert_close(one.mean, other.mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_share_of_queries_over_all_leaves_changes_no_expectation(share: float) -> None:
    """Equal targets at equal places: a part of the queries says what all say."""
    data = batch()
    same = replace(data, xt=data.xt[:, :1].expand(2, 7, 2), yt=data.yt[:, :1].expand(2, 7, 1))
    settings = ObjectiveConfig(lambda_rl=0.0, lambda_mass=0.1)
    found = ReTreever.from_transformer_ca(model(), objective=settings).train()
    part = ReTreever.from_transformer_ca(model(), objective=replace(settings, share=share)).train()
    part.load_state_dict(found.state_dict())
    torch.testing.assert_close(part.loss(same), found.loss(same))


def test_nodes_that_learn_for_a_budget_are_read_near_it_in_every_step() -> None:
    found = ReTreever.from_transformer_ca(model(), objective=teaching(20))
    generator = torch.Generator().manual_seed(0)
    drawn = [found.draws_for(batch(), generator).budget or 0 for _ in range(200)]
    assert set(drawn) == set(range(11, 21)) and teaching(0).lambda_mass > 0 == teaching(20).lambda_mass


def test_random_budgets_are_drawn_for_half_of_the_steps() -> None:
    found = ReTreever.from_transformer_ca(model(), objective=ObjectiveConfig(budgets=20))
    generator = torch.Generator().manual_seed(0)
    drawn = [found.draws_for(batch(), generator).budget for _ in range(200)]
    budgets = [budget for budget in drawn if budget is not None]
    assert 70 < len(budgets) < 130 and 1 <= min(budgets) <= 3 and 18 <= max(budgets) <= 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": ReTreever(**SIZES)}, "model: expected a TransformerCA"),
        ({"first": 0.0}, "first: expected a share of the steps"),
        ({"learn": "leaves"}, "learn: expected one of nodes, all"),
        ({"budgets": -1}, "budgets: expected an int >= 0"),
        ({"tree": 8}, "tree: expected a dict of settings of the tree, got int"),
        ({"tree": {"branch": 1}}, "branch: expected an int >= 2"),
        ({"tree": {"dim": 8}}, "dim: expected 16, as trained, got 8"),
        ({"folder": 3}, "folder: expected a path, got int"),
    ],
)
def test_what_has_no_two_stages_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    taken = []

    class Counted(list[Batch]):
        def __iter__(self) -> Any:
            taken.append(1)
            return super().__iter__()

    with pytest.raises(InputError, match=f"^{message}"):
        fit_staged(**{"model": model(), "data": Counted([batch()]), "config": CONFIG} | wrong)
    assert not taken  # nothing was trained before


def test_one_path_is_learned_by_all_weights_from_early_on() -> None:
    """Validation batches may be a generator, which both stages look at."""
    tree = {"branch": 4, "mean_levels": 1}
    first, looks = model(), (batch(seed) for seed in (1, 2))
    found, history = fit_staged(first, [batch()], replace(CONFIG, steps=20), learn="all", tree=tree, validation=looks)
    assert [record.step for record in history] == [5, 10, 15, 20] and found.config.branch == 4
    assert not torch.equal(found.attention.block.to_q.weight, first.attention.block.to_q.weight)
    assert found.config.objective == teaching(0, "all") and not found.config.objective.lambda_mass


def test_a_budget_is_what_the_result_reads_and_is_validated_with() -> None:
    found, history = fit_staged(model(), [batch()], CONFIG, budgets=20, validation=[batch(1)])
    assert found.config.budget == 20 and history[-1].metric == pytest.approx(evaluate(found, None, [batch(1)]))
    assert history[-1].metric != pytest.approx(evaluate(found.set_reading(), None, [batch(1)]))


@pytest.mark.parametrize("stop", [3, 8])
def test_both_stages_go_on_from_where_they_were_stopped(stop: int, tmp_path: Path) -> None:
    config, seen = replace(CONFIG, steps=10, evaluate_every=1, save_every=1), []

    def train(folder: Path, watch: Any = None) -> Any:
        torch.manual_seed(3)
        return fit_staged(model(), [batch(0), batch(1)], config, first=0.5, folder=folder, keep="last", watch=watch)

    def stopping(progress: Any) -> None:
        seen.append(progress.step)
        if len(seen) == stop:
            raise RuntimeError("power cut")

    whole, history = train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path / "cut", stopping)
    torch.rand(7)  # the state of torch's own generator is another one when a process starts again
    again, records = train(tmp_path / "cut")
    assert [r.step for r in records] == [r.step for r in history]
    torch.testing.assert_close(dict(again.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
