"""Sweeps: every variant of every file can be trained, and scores come from validation alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.lab.recipes.recipe import make_recipe
from retreever.tasks.gp import GPTask

FOLDER = Path(__file__).parents[3] / "experiments"
SWEEPS = sorted((FOLDER / "sweeps").glob("*.toml"))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("sweep", FOLDER / "sweep.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", SWEEPS, ids=[file.stem for file in SWEEPS])
def test_variants_can_be_made(file: Path) -> None:
    made = script().recipes(file)
    settings = [str(recipe.to_json()) for recipe in made.values()]
    assert len(set(settings)) == len(settings) > 10
    with torch.device("meta"):
        assert all(list(recipe.make_model().parameters()) for recipe in made.values())


def test_scores_are_those_of_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last weights, of their mean over the last looks, and of a tree under every reading."""
    monkeypatch.setattr(GPTask, "test", lambda self: pytest.fail("read the test set"))
    whole = GPTask.validation
    monkeypatch.setattr(GPTask, "validation", lambda self: iter([next(whole(self))]))
    small = {
        "layers": 1,
        "dim": 8,
        "hidden": 8,
        "batch": 2,
        "steps": 6,
        "warmup": 1,
        "evaluate_every": 1,
        "sizes": "batch",
    }
    found = script().train({"tree": make_recipe("gp", **small)}, {}, None, "cpu")["tree"]
    assert abs(found["last"] - found["curve"][-1][1]) < 1e-3
    assert found["best"] >= found["last"] and found["mean"] != found["last"]
    assert {"last, full", "mean, full", "last, budget 14", "mean, budget 28"} <= found.keys()
