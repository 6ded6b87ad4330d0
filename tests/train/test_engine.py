"""The training loop: it learns, repeats itself to the bit, keeps its seeds apart and stops on nonsense."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from retreever import Batch, InputError, ReTreever, RetreeverError, TransformerCA
from retreever.tasks.copy import VOCABULARY, CopyTask
from retreever.train import fit
from retreever.train.config import Precision, TrainConfig
from retreever.train.log import Board
from retreever.train.optimise import learning_rate, make_optimiser
from retreever.train.protocols import Progress
from retreever.train.score import evaluate

TINY = {
    "dim_y": VOCABULARY, "inputs": "sequence", "head": "categorical", "encoder": "identity",
    "dim": 16, "heads": 2, "hidden": 32,
}  # fmt: skip
CONFIG = TrainConfig(steps=12, batch=8, warmup=4, evaluate_every=4)


def trained(config: TrainConfig = CONFIG) -> tuple[ReTreever, list[float]]:
    torch.manual_seed(1)
    model = ReTreever(**TINY, order="given", dropout=0.1)
    return model, [record.metric for record in fit(model, CopyTask(8), config)]


def test_training_solves_a_short_copy() -> None:
    """Cross attention learns to copy 8 symbols in a few seconds; an untrained model guesses."""
    torch.manual_seed(0)
    model = TransformerCA(**{**TINY, "dim": 32})
    before = evaluate(model, CopyTask(8), CopyTask(8).test())
    history = fit(model, CopyTask(8), TrainConfig(steps=600, batch=64, lr=3e-3, warmup=50, stop_at=99.0))
    assert before < 40 and history[-1].metric >= 99.0


def test_same_seed_same_bits_and_another_seed_others() -> None:
    (first, curve), (again, same_curve) = trained(), trained()
    other, _ = trained(replace(CONFIG, seed=1))
    assert curve == same_curve
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_evaluation_is_greedy_repeatable_and_leaves_the_mode_alone() -> None:
    model, _ = trained()
    values = {evaluate(model, CopyTask(8), CopyTask(8).validation()) for _ in range(3)}
    assert len(values) == 1 and model.training


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_trains_and_leaves_torchs_settings_alone(precision: Precision) -> None:
    before = torch.get_float32_matmul_precision()
    model, curve = trained(replace(CONFIG, precision=precision))
    assert len(curve) == 3 and all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert torch.get_float32_matmul_precision() == before and not torch.are_deterministic_algorithms_enabled()


def test_it_stops_early_when_told() -> None:
    model = ReTreever(**TINY, order="given")
    assert len(fit(model, CopyTask(8), replace(CONFIG, stop_at=0.0))) == 1


def test_learning_rate_rises_then_falls() -> None:
    config = TrainConfig(steps=100, warmup=10)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 == max(rates)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.01
    assert math.isclose(learning_rate(config, 55), 0.5)
    assert learning_rate(replace(config, schedule="constant"), 99) == 1.0


def test_published_optimiser() -> None:
    published = TrainConfig().as_published()
    optimiser = make_optimiser(torch.nn.Linear(2, 2), published)
    group = optimiser.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (5e-4, (0.1, 0.999), 0.0)


def test_a_loss_that_is_no_number_stops_training_by_name() -> None:
    model = ReTreever(**TINY, order="given")
    with torch.no_grad():
        model.head.net[-1][-1].bias.fill_(torch.inf)
    with pytest.raises(RetreeverError, match=r"^training stopped at step 1: the loss term '\w+' is (nan|inf)"):
        fit(model, CopyTask(8), CONFIG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"lr": "1e-3"}, {"clip": None}, {"betas": 0.9}, {"betas": (0.9,)}, {"stop_at": "5"},
        {"compile": "no"}, {"graph": 1}, {"batch": 1.5},
        {"lr": 0.0}, {"lr": math.nan}, {"betas": (0.9, 1.0)}, {"clip": -1},
        {"schedule": "linear"}, {"seed": -1}, {"warmup": True}, {"weight_decay": -0.1},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(wrong))}: expected "):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_progress_is_plain_lines_when_not_on_a_terminal() -> None:
    stream = io.StringIO()
    with Board(["tree"], seconds=3600, stream=stream) as board:
        for step in range(1, 5):
            board.watcher()(Progress(step, 4, loss=0.5, metric=None if step < 3 else 90.0, seconds=step))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(text.startswith("tree: step") for text in lines)
    assert "accuracy -" in lines[0] and "step 4/4" in lines[1] and "accuracy 90.00" in lines[1]


@pytest.mark.parametrize("training", [False, True])
def test_the_model_comes_back_in_the_mode_it_came_in(training: bool) -> None:
    """A model in training mode samples its paths: predictions of one that was not would change from call to call."""
    model = ReTreever(**TINY, order="given").train(training)
    fit(model, CopyTask(8), CONFIG)
    assert model.training is training


def test_the_term_that_is_no_number_is_named() -> None:
    model = ReTreever(**TINY, order="given", reward=lambda _, truth: truth * math.nan)
    with pytest.raises(RetreeverError, match="step 1: the loss term 'policy' is nan, 'reward' is nan"):
        fit(model, CopyTask(8), CONFIG)


def test_data_that_are_not_finite_are_not_blamed_on_the_learning_rate() -> None:
    x, y = torch.rand(1, 5, 1), torch.rand(1, 3, 1)
    batch = Batch(x, x, y, torch.full_like(y, math.nan))
    with pytest.raises(RetreeverError, match=r"^yt: .* in the data; output_mask says which outputs are known\)$"):
        fit(TransformerCA(dim=16, layers=1), [batch], TrainConfig(steps=2))


def test_weights_that_run_away_are_not_blamed_on_the_data_alone() -> None:
    model = ReTreever(**TINY, order="given")
    with pytest.raises(RetreeverError, match=r"step \d+.*; if the data are finite, the learning rate may be too high"):
        fit(model, CopyTask(8), TrainConfig(steps=30, batch=4, lr=1e18, warmup=0, clip=0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"config": {"steps": 3}}, "^config: expected a TrainConfig, got dict"),
        ({"data": CopyTask}, "^task: expected a task, got the class CopyTask"),
        ({"data": [1]}, "^data: expected items that are a Batch or a tuple"),
        ({"model": torch.ones(1)}, "^model: expected a model of this library, .* got Tensor"),
        ({"model": ReTreever(**TINY).requires_grad_(False)}, "^model: expected weights to train, got none"),
        pytest.param(
            {"device": "cuda"}, "^device: cuda is not available here, only cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": ReTreever(**TINY), "data": CopyTask(8), "config": CONFIG} | wrong
    with pytest.raises(RetreeverError, match=message):
        fit(**arguments)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_mode_is_given_back_as_it_was(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        fit(ReTreever(**TINY, order="given"), CopyTask(8), TrainConfig(steps=1, batch=2, warmup=0))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    finally:
        torch.use_deterministic_algorithms(False)
