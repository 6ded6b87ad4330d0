"""Score against tokens read: every reading with the same weights, ragged contexts, what is worse, and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever import Batch, ReTreever
from retreever.batch import collate
from retreever.cli import main
from retreever.errors import InputError
from retreever.lab.bench.budget_tables import budget_table, drops
from retreever.lab.bench.budgets import all_tokens_score, make_readings, score_rows
from retreever.lab.bench.options_models import BudgetsBench
from retreever.lab.recipes.recipe import make_recipe
from retreever.tasks.gp import GPTask


def test_budgets_are_multiples_of_one_path() -> None:
    readings = make_readings(9, (2, 1.25, 1.5))
    assert [reading.name for reading in readings] == ["one path", "1.25x", "1.5x", "2x", "all"]
    assert [reading.budget for reading in readings] == [None, 11, 13, 18, None]
    assert readings[-1].retrieval == "full"


def test_ragged_contexts_are_read_as_if_alone() -> None:
    """Contexts of 21 and 5 points, with 4 and 2 targets: padding is neither scored nor counted."""
    torch.manual_seed(0)
    model = ReTreever(dim=16, heads=2, layers=1, hidden=16)
    alone = [Batch(*(torch.rand(1, count, 1) for count in (n, n, m, m))) for n, m in ((21, 4), (5, 2))]
    readings = make_readings(6, (1.5, 2))
    device, task = torch.device("cpu"), GPTask()
    joined = score_rows(model, task, iter([collate(alone)]), readings, device)
    first, second = (score_rows(model, task, iter([batch]), readings, device) for batch in alone)
    for both, one, other in zip(joined, first, second, strict=True):
        for key in ("score", "tokens"):
            assert both[key] == pytest.approx((4 * one[key] + 2 * other[key]) / 6, abs=1e-3)
    assert (first[-1]["tokens"], second[-1]["tokens"], second[1]["tokens"]) == (21, 5, 5)
    assert first[0]["tokens"] <= 6 < first[1]["tokens"] <= 9 <= first[2]["tokens"] <= 12


def rows(scores: list[float], metric: str = "log-likelihood") -> list[dict[str, Any]]:
    about = {"weights": "w", "test": "t", "metric": metric, "hardware": "CPU", "data": "d", "all_tokens": 1.0}
    about |= {"all_tokens_std": None}
    names = ["one path", "2x", "all"]
    return [{**about, "reading": name, "tokens": 5.0, "score": s} for name, s in zip(names, scores, strict=True)]


@pytest.mark.parametrize(
    ("scores", "metric", "drop", "worse"),
    [
        ([1.0, 1.1, 1.2], "log-likelihood", 0.0, False),
        ([1.0, 1.1, 1.0975], "log-likelihood", 0.0025, False),
        ([1.0, 0.9, 1.2], "log-likelihood", 0.1, True),
        ([1.0, 0.998, 0.9965], "log-likelihood", 0.0035, True),  # little by little
        ([92.0, 92.2, 92.15], "accuracy in %", 0.05, False),
        ([92.0, 92.2, 92.05], "accuracy in %", 0.15, True),
    ],
)
def test_more_that_scores_less_is_called_worse(scores: list[float], metric: str, drop: float, worse: bool) -> None:
    (found,) = drops(rows(scores, metric))
    assert found["drop"] == pytest.approx(drop) and found["worse"] is worse
    assert ("WORSE" in str(budget_table(rows(scores, metric)).rows[0][-1])) is worse


def test_the_model_over_all_tokens_is_found_by_its_name() -> None:
    entry = {"scores": {"rbf": 1.0}}
    results: dict[str, Any] = {"gp-rbf-transformer-ca-seed0": entry, "gp-rbf-retreever-seed0": {"scores": {"rbf": 9.0}}}
    results["gp-rbf-transformer-ca-seed1"] = {"scores": {"rbf": 2.0}}
    found = all_tokens_score(make_recipe("gp", branch=4, seed=5), "rbf", results)
    assert found == {"all_tokens": 1.5, "all_tokens_std": pytest.approx(0.5**0.5), "all_tokens_seeds": 2}
    assert all_tokens_score(make_recipe("gp"), "rbf", {})["all_tokens"] is None


def test_a_run_is_measured_and_added_to_earlier_weights(tmp_path: Path) -> None:
    few = ["--steps", "4", "--batch", "8", "--warmup", "1", "--evaluate-every", "4", "--save-every", "4"]
    assert main(["train", "copy", "--n", "32", *few, "--device", "cpu", "--out", str(tmp_path)]) == 0
    out, run = tmp_path / "bench", tmp_path / "copy-32-tca-seed0"
    shared: dict[str, Any] = {"out": out, "device": "cpu", "batches": 1, "data": tmp_path / "none"}
    BudgetsBench(models=("copy-256", "emnist"), experiments=tmp_path, **shared).run()
    BudgetsBench(models=(), runs=(run,), experiments=tmp_path, add=True, **shared).run()
    result = json.loads((out / "budgets-cpu.json").read_text())
    found = {name: [row for row in result["rows"] if row["weights"] == name] for name in ("copy-256", run.name)}
    assert [row["tokens"] for row in found["copy-256"]] == [8, 10, 12, 16, 24, 32, 128]
    assert [row["tokens"] for row in found[run.name]] == [5, 6, 7, 10, 15, 16, 16]
    assert all(row["score"] > 99.9 for row in found["copy-256"])
    assert {"seed", "hardware", "data", "std", "batches", "metric"} <= found[run.name][0].keys()
    assert str(tmp_path) not in json.dumps(result)
    assert "copy-32-tca-seed0, test" in (out / "budgets-cpu.md").read_text() and (out / "budgets-cpu.png").exists()


def test_weights_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^models: expected weights whose data are there, got emnist: expected"):
        BudgetsBench(out=tmp_path, models=("emnist",), device="cpu", data=tmp_path / "none", experiments=tmp_path).run()
    assert "emnist: left out" in capsys.readouterr().err
    assert main(["bench", "budgets", "--out", str(tmp_path), "--runs", str(tmp_path / "no-run")]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
