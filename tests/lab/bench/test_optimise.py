"""The benchmarks of optimisation and bandits run, and their tables say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.lab.recipes.recipe import make_recipe


def test_optimisation_is_measured_for_models_and_for_the_process_itself(tmp_path: Path) -> None:
    command = ["bench", "optimise", "--device", "cpu", "--quick", "--kernels", "rbf", "--out", str(tmp_path)]
    assert main(command) in (0, None)
    rows = json.loads((tmp_path / "optimise-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows] == ["ReTreever", "ReTreever, all leaves", "GP, true kernel"]
    for row in rows:
        assert len(row["regret"]) == 6 and row["regret"] == sorted(row["regret"], reverse=True)
        assert 1 <= row["evaluations"] <= 7
    assert "Bayesian optimisation" in (tmp_path / "optimise-cpu.md").read_text(encoding="utf-8")


def test_trained_models_play_the_wheel(tmp_path: Path) -> None:
    settings = "--dim 16 --layers 1 --steps 2 --warmup 1 --batch 2 --evaluate-every 2 --device cpu"
    train = ["train", "wheel", "--model", "transformer-ca", *settings.split(), "--out", str(tmp_path)]
    assert main(train) in (0, None)
    run = tmp_path / make_recipe("wheel", model="transformer-ca").name
    play = ["bench", "bandit", "--device", "cpu", "--runs", str(run), "--deltas", "0.7", "--steps", "12"]
    assert main([*play, "--players", "3", "--window", "6", "--budget", "3", "--out", str(tmp_path)]) in (0, None)
    uniform, player, tree = json.loads((tmp_path / "bandit-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert uniform["method"] == "uniform" and 50 < uniform["cumulative"] < 150
    assert player["method"] == run.name and player["steps"] == 2 and player["cumulative"] >= 0
    assert tree["method"] == f"{run.name}, tree, 3 read" and tree["steps"] == 2


def test_players_and_deltas_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    play = ["bench", "bandit", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "a" / "r")]
    assert main([*play, str(tmp_path / "b" / "r")]) == 2
    assert "runs: expected folders of different names" in capsys.readouterr().err
    assert main([*play, "--deltas", "0.5", "0.5"]) == 2
    assert "deltas: expected at least one value, all different" in capsys.readouterr().err
    assert main(["bench", "optimise", "--out", str(tmp_path / "out"), "--kernels"]) == 2
    assert "kernels: expected at least one value" in capsys.readouterr().err


def test_bandits_need_runs_of_the_wheel_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "bandit", "--out", str(tmp_path)]) == 2
    assert "runs: expected folders of runs of the wheel task" in capsys.readouterr().err
