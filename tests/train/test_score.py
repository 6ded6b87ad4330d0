"""Scores: every batch weighs the same, alone or joined with others, and a failure leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever import Batch, ReTreever, TransformerCA
from retreever.tasks.gp import GPTask
from retreever.train import evaluate as public_evaluate
from retreever.train.score import _groups, evaluate


def small_task() -> GPTask:
    return GPTask(test_batches=6)


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA])
def test_joined_batches_score_as_they_do_alone(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, task = kind(dim=16, layers=1, hidden=16).double().eval(), small_task()
    batches = [_double(batch) for batch in task.test()]
    alone = evaluate(model, task, batches)
    monkeypatch.setattr("torch.device", _Pretend)  # as on an accelerator, where batches are joined
    joined = evaluate(model, task, batches)
    assert abs(alone - joined) < 1e-9


class _Pretend:
    def __init__(self, name: str) -> None:
        self.type = "pretend"


def _double(batch: Batch) -> Batch:
    return Batch(batch.xc.double(), batch.yc.double(), batch.xt.double(), batch.yt.double())


def test_groups_hold_all_batches_in_order_and_no_more_points_than_allowed() -> None:
    batches = list(small_task().test())
    for most in (0, 1_000, 3_000, 10**9):
        groups = list(_groups(iter(batches), most))
        assert [id(b) for group in groups for b in group] == [id(b) for b in batches]
        for group in groups:
            longest = max(b.xc.shape[1] for b in group) + max(b.xt.shape[1] for b in group)
            assert len(group) == 1 or longest * 16 * len(group) <= most


def test_a_metric_that_fails_leaves_the_model_in_training_mode() -> None:
    class Broken(GPTask):
        @staticmethod
        def metric(dist: Distribution, batch: Batch) -> Tensor:
            raise ZeroDivisionError

    model = TransformerCA(dim=16, layers=1, hidden=16).train()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, Broken(test_batches=1), Broken(test_batches=1).test())
    assert model.training


def test_it_is_public() -> None:
    assert public_evaluate is evaluate
