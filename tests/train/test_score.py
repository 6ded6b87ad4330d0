"""Scores: every batch weighs the same, alone or joined with others, and a failure leaves the model as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever import NP, Batch, InputError, ReTreever, TransformerCA
from retreever.tasks.gp import GPTask
from retreever.train import evaluate as public_evaluate
from retreever.train.score import _groups, _points_at_once, evaluate


def small_task() -> GPTask:
    return GPTask(test_batches=6)


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA])
def test_joined_batches_score_as_they_do_alone(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, task = kind(dim=16, layers=1, hidden=16).double().eval(), small_task()
    batches = [_double(batch) for batch in task.test()]
    alone = evaluate(model, task, batches)
    at_once = _points_at_once(model, torch.device("cuda"))
    assert at_once == 2**18 and _points_at_once(NP(), torch.device("cuda")) == 2**21 // 50
    monkeypatch.setattr("retreever.train.score._points_at_once", lambda *_: at_once)  # as on an accelerator
    joined = evaluate(model, task, batches)
    assert abs(alone - joined) < 1e-9


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


def ragged_targets() -> Batch:
    """As many rows as targets: what has the wrong shape would broadcast unnoticed."""
    xc, xt = torch.rand(4, 6, 1), torch.rand(4, 4, 1)
    return Batch(xc, xc.sin(), xt, xt.sin(), target_mask=torch.arange(4) < torch.arange(1, 5)[:, None])


@pytest.mark.parametrize("shape", [(4, 4, 1), (4,), (), (4, 1)])
def test_a_metric_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    class Odd(GPTask):
        @staticmethod
        def metric(dist: Distribution, batch: Batch) -> Tensor:
            return torch.ones(shape)

    with pytest.raises(InputError, match=r"^metric: expected one value per query, shape \(4, 4\), got "):
        evaluate(TransformerCA(dim=16, layers=1, hidden=16), Odd(), [ragged_targets()])


def test_what_stands_at_masked_targets_changes_no_score() -> None:
    batch, model, task = ragged_targets(), TransformerCA(dim=16, layers=1, hidden=16), small_task()
    assert batch.target_mask is not None
    unknown = replace(batch, xt=batch.xt.masked_fill(~batch.target_mask[..., None], torch.nan))
    assert evaluate(model, task, [unknown]) == evaluate(model, task, [batch])


@pytest.mark.parametrize(("batches", "got"), [([], "at least one batch, got none"), (ragged_targets(), "a Batch")])
def test_batches_have_to_be_batches(batches: Any, got: str) -> None:
    with pytest.raises(InputError, match=f"^batches: .*{got}"):
        evaluate(TransformerCA(dim=16, layers=1, hidden=16), small_task(), batches)


def test_models_that_sample_score_the_same_every_time() -> None:
    """And leave the stream of random numbers as it was."""
    task = GPTask()
    torch.manual_seed(0)
    model, batches = NP(dim=8, heads=2), list(task.validation(2))
    state = torch.get_rng_state()
    first = evaluate(model, task, batches)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert evaluate(model, task, batches) == first


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"yt": torch.full((4, 4, 1), torch.nan)}, "yt: expected finite values"),
    ({"yt": torch.rand(4, 4, 3)}, r"yt: expected shape \(b, m, dy=1\), got \(4, 4, 3\)"),
    ({"yt": torch.rand(4, 1, 1)}, r"yt: expected shape \(b=4, m=4, dy\)"),
    ({"yt": torch.rand(1, 4, 1)}, r"yt: expected shape \(b=4, m=4, dy\)"),
    ({"yt": torch.rand(4, 4)}, r"yt: expected shape \(b=4, m=4, dy\)"),
    ({"target_mask": torch.ones(1, 4, dtype=torch.bool)}, r"target_mask: expected shape \(b=4, m=4\)"),
    ({"output_mask": torch.ones(4, 1, dtype=torch.bool)}, r"output_mask: expected shape"),
)


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("own", [False, True])
def test_batches_are_checked_as_those_of_training(wrong: dict[str, Any], message: str, own: bool) -> None:
    """They would broadcast, and NaN would count as not known: as predicted without a mistake."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TransformerCA(dim=16, layers=1, hidden=16)

        def predict(self, *inputs: Any) -> Distribution:
            return self.inner.predict(*inputs)

        def loss(self, batch: Batch) -> Any:
            return self.inner.loss(batch)

    model: Any = TransformerCA(dim=16, layers=1, hidden=16) if own else Wrapped()
    if not own and "dy=1" in message:
        message = "yt: expected shape .*, as predictions have"
    with pytest.raises(InputError, match=f"^{message}"):
        evaluate(model, None, [replace(ragged_targets(), **({"target_mask": None} | wrong))])


def test_tuples_are_batches_and_a_metric_that_is_no_number_is_refused() -> None:
    model, whole = TransformerCA(dim=16, layers=1, hidden=16), replace(ragged_targets(), target_mask=None)
    assert evaluate(model, None, [(whole.xc, whole.yc, whole.xt, whole.yt)]) == evaluate(model, None, [whole])  # type: ignore[list-item]

    class Nothing(GPTask):
        @staticmethod
        def metric(dist: Distribution, batch: Batch) -> Tensor:
            return dist.mean[..., 0] * torch.nan

    with pytest.raises(InputError, match=r"^metric: expected numbers .*, got NaN in 1 of 1"):
        evaluate(model, Nothing(), [whole])
