"""`retreever bench jobs`: data and answers of the jobs, training for a time, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from retreever import ReTreever, TransformerCA
from retreever.cli import main
from retreever.errors import BackendError
from retreever.lab.bench.jobs import co2, jobs, training

CPU = torch.device("cpu")


def seasons() -> torch.Tensor:
    """Weekly values with a trend, a yearly wave and a few missing weeks."""
    week = torch.arange(2284)
    return (315 + 0.03 * week + 3 * torch.sin(2 * torch.pi * week / 52.18)).masked_fill(week % 97 == 5, torch.nan)


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> co2.Gaps:
    monkeypatch.setattr(co2, "read_co2", seasons)
    return co2.Gaps()


def test_what_is_hidden_is_asked_and_not_seen(gaps: co2.Gaps) -> None:
    batch = gaps.sample(20, torch.Generator().manual_seed(0)).validate()
    assert not (batch.context_mask & batch.target_mask)[:, 1:].any()
    assert all(test.target_mask[:, 46:58].any() and not test.target_mask[:, 58:].any() for test in gaps.tests())


def test_lines_are_those_of_numpy_and_a_process_knows_the_year(gaps: co2.Gaps) -> None:
    batch = gaps.tests()[0]
    seen = batch.context_mask[3]
    expected = np.interp(batch.xt[3, :, 0], batch.xc[3, seen, 0], batch.yc[3, seen, 0])
    assert np.allclose(co2.line(batch)[3, :, 0], expected, atol=1e-5)
    answers = gaps.usual()
    errors = {name: gaps.total([gaps.error(answer(batch), batch)]) for name, answer in answers.items()}
    assert errors["Gaussian process"] < 0.15 < errors["straight line"]


def test_neighbours_of_one_point_are_its_value() -> None:
    job = jobs.Field(64)
    batch = job.sample(2, torch.Generator().manual_seed(0))
    nearest = torch.cdist(batch.xt, batch.xc).argmin(dim=-1)
    torch.testing.assert_close(jobs.neighbours(batch, 1)[..., 0], batch.yc[..., 0].gather(1, nearest))
    assert job.error(jobs.best_neighbours(job)(batch), batch)[0] < job.error(torch.zeros_like(batch.yt), batch)[0]


def test_looking_up_the_nearest_is_always_right() -> None:
    job = jobs.Nearest(n=32)
    (answer,) = job.usual().values()
    assert job.total([job.error(answer(batch), batch) for batch in job.tests()]) == 100


def test_digits_and_photo_come_from_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    digits, photo = jobs.Digits(), jobs.Photo()
    (answer,) = digits.usual().values()
    assert digits.total([digits.error(answer(batch), batch) for batch in digits.tests()]) > 95
    batch = photo.sample(2, torch.Generator().manual_seed(0)).validate()
    assert batch.xc.shape == (2, 512, 2) and batch.yt.shape == (2, 256, 3) and float(batch.xc.abs().max()) <= 1


def test_training_ends_with_its_time_and_the_stages_end_in_a_tree() -> None:
    job = jobs.Field(64)
    first = training.train(job, TransformerCA(**job.fields), 0.05, 0, CPU)
    tree = training.staged(job, 0.2, 0, CPU, 9)
    assert first.steps >= 1 and not first.model.training and isinstance(tree.model, ReTreever)
    found = training.measured(tree.model, job, job.tests(1), CPU, budget=20)
    assert 7 < found["tokens"] <= 20 and found["score"] > 0 and found["us"] > 0


def test_the_command_writes_every_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retreever.lab.bench.jobs.MAKERS", {"nearest": lambda: jobs.Nearest(n=16), "co2": _absent})
    words = ["bench", "jobs", "--quick", "--seconds", "0.05", "--seeds", "0", "1", "--only", "nearest", "co2"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "jobs-cpu.json").read_text())
    methods = {row["method"] for row in found["summary"]["jobs"]}
    assert {"nearest neighbour", "all tokens", "Perceiver IO", "tree, one path", "tree, 10% read"} <= methods
    assert found["summary"]["left_out"].keys() == {"co2"} and (tmp_path / "jobs-cpu.png").stat().st_size > 1000
    assert "| all tokens" in (tmp_path / "jobs-cpu.md").read_text()


def test_a_stopped_run_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retreever.lab.bench.jobs.MAKERS", {"nearest": lambda: jobs.Nearest(n=16)})
    words = ["bench", "jobs", "--seconds", "0.02", "--only", "nearest", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--seeds", "0"]) == 0
    before = json.loads((tmp_path / "jobs-cpu.json").read_text())["rows"]
    capsys.readouterr()
    assert main([*words, "--seeds", "0", "1", "--resume"]) == 0
    assert "seed 0" not in capsys.readouterr().err
    after = json.loads((tmp_path / "jobs-cpu.json").read_text())["rows"]
    assert after[: len(before)] == before and {row["seed"] for row in after[len(before) :]} == {1}
    assert main([*words[:2], "--seconds", "0.03", *words[4:], "--seeds", "0", "--resume"]) == 2
    assert "resume: expected an earlier run with" in capsys.readouterr().err


def _absent() -> jobs.Job:
    raise BackendError("statsmodels: expected the package, got none")
