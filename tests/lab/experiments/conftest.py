"""A small folder of recipe files, the paper's numbers and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
title = "Small copies"
place = 1
task = "copy"
paper = ["copy"]
seeds = [0, 1]
figure = "tokens"
settings = { steps = 4, batch = 8, warmup = 1, evaluate_every = 2, save_every = 2 }

[systems.ca]
name = "Cross Attention"
paper = "cross_attention"
settings = { model = "ca" }

[systems.tca]
name = "TCA"
paper = "tca"
settings = { model = "tca" }

[systems.tca_full]
name = "TCA, all leaves"
settings = { model = "tca" }
full = true

[systems.random]
name = "Random"
paper = "random"
computed = "random-guess"

[columns.8]
name = "N = 8"
paper = { n = 8 }
settings = { n = 8 }
"""
PAPER = {
    "tables": [
        {
            "id": "copy",
            "rows": [
                {"system": "cross_attention", "setting": {"n": 8}, "tokens_percent": 100.0, "mean": 90.0, "std": 1.5,
                 "printed": "90.0 ± 1.5"},
                {"system": "tca", "setting": {"n": 8}, "tokens_percent": 75.0, "mean": 80.0, "std": 0.5,
                 "printed": "80.0 ± 0.5"},
                {"system": "tca", "setting": {"n": 16}, "tokens_percent": 50.0, "mean": None, "std": None,
                 "printed": "OOM"},
            ],
        }
    ]
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as experiments/ is, with the recipe `small`."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "small.toml").write_text(RECIPE)
    (folder / "paper.json").write_text(json.dumps(PAPER))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Leaves a finished run folder with made-up scores."""

    def make(name: str, scores: dict[str, float], looks: int = 3, **config: Any) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        task, model, seed = config.pop("task", "copy"), config.pop("model", "tca"), config.pop("seed", 0)
        settings = {"task": task, "model": model, "n": 8, "seed": seed, "preset": "default", "batch": 8, "keep": 2}
        (run / "config.json").write_text(json.dumps(settings | config))
        rows = [{"step": 10 * i, "metric": 50.0 + i, "loss": 1.0, "seconds": 0.5 * i} for i in range(1, looks + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = {
            "test": 1.0, "scores": scores, "metric": "accuracy in %", "steps": 400, "seconds": 2.5, "tokens": 3,
            "context": 4, "parameters": 9, "hardware": "NVIDIA H200", "versions": {"retreever": "0"},
        }  # fmt: skip
        (run / "result.json").write_text(json.dumps(result))
        return run

    return make
