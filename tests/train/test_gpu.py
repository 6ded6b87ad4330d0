"""Training on a GPU: CUDA graphs, deterministic mode, runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.errors import RetreeverError
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint
from retreever.train.engine import Trainer
from retreever.train.run import RunFolder
from retreever.train.together import Run, train_in, train_together

pytestmark = pytest.mark.gpu
BRIEF: dict[str, Any] = {
    "steps": 60, "batch": 8, "warmup": 4, "evaluate_every": 25, "save_every": 10, "deterministic": True,
}  # fmt: skip
COPY = make_recipe("copy", n=32, **BRIEF)
GP = make_recipe("gp", layers=2, dropout=0.1, **BRIEF)
SAMPLED = {name: make_recipe("gp", model=name, dim=16, **BRIEF) for name in ("anp", "bnp", "banp")}
OTHERS = {name: make_recipe("gp", model=name, layers=2, **BRIEF) for name in ("tnpd", "lbanp", "cmanp")}
RECIPES = {"copy": COPY, "gp": GP, "gp-rooms": GP.changed(sizes="batch"), **SAMPLED, **OTHERS}
both = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def a_trainer(recipe: Recipe) -> Trainer:
    torch.manual_seed(7)
    return Trainer(recipe.make_model(), recipe.task.make(None), recipe.train, "cuda")


def assert_same(one: RunFolder, other: RunFolder) -> None:
    tensors = []
    for folder in (one, other):
        found = latest_checkpoint(folder.checkpoints)
        assert found is not None
        tensors.append(load_checkpoint(found)[0])
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])] == []


def folder(path: Path) -> RunFolder:
    path.mkdir(parents=True)
    return RunFolder(path)


class Killed(Exception):
    """The process is gone."""


@both
def test_resumed_runs_have_the_bits_of_uninterrupted_ones(recipe: Recipe, tmp_path: Path) -> None:
    whole, broken = folder(tmp_path / "whole"), folder(tmp_path / "broken")
    train_in(whole, a_trainer(recipe))

    def kill(progress: Any) -> None:
        if progress.step == 40:
            raise Killed

    with pytest.raises(Killed):
        train_in(broken, a_trainer(recipe), kill)
    torch.rand(13, device="cuda")
    train_in(broken, a_trainer(recipe))
    assert_same(whole, broken)


@both
def test_in_company_a_run_has_the_bits_it_has_alone(recipe: Recipe, tmp_path: Path) -> None:
    seeds = (0, 1, 2)
    runs = [Run(folder(tmp_path / f"together{seed}"), a_trainer(recipe.changed(seed=seed))) for seed in seeds]
    train_together(runs)
    for seed, run in zip(seeds, runs, strict=True):
        alone = folder(tmp_path / f"alone{seed}")
        train_in(alone, a_trainer(recipe.changed(seed=seed)))
        assert_same(run.folder, alone)


@both
def test_a_graph_learns_as_separate_kernels_do(recipe: Recipe) -> None:
    metrics = []
    for graph in (True, False):
        trainer = a_trainer(recipe.changed(graph=graph, steps=200, evaluate_every=200, deterministic=False))
        assert trainer.graphed is graph
        while not trainer.done:
            trainer.advance()
        metrics.append(trainer.history[-1].metric)
    assert abs(metrics[0] - metrics[1]) < (10 if recipe.task.name == "copy" else 0.3)


def test_a_loss_that_is_no_number_is_named_with_its_step() -> None:
    trainer = a_trainer(COPY)
    trainer.advance()
    for _ in range(3):
        trainer.launch()
    with torch.no_grad(), trainer.working():
        next(iter(trainer.model.parameters())).fill_(torch.nan)
    for _ in range(2):
        trainer.launch()
    message = f"training stopped at step {trainer.step - 1}: the loss term '\\w+' is nan, "
    with pytest.raises(RetreeverError, match=message):
        trainer.settle()


def test_half_precision_trains() -> None:
    trainer = a_trainer(GP.changed(precision="bf16", steps=50, evaluate_every=50, deterministic=False))
    while not trainer.done:
        trainer.advance()
    assert trainer.history[-1].metric > -2
