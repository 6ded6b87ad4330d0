"""`retreever bench jobs`: data and answers of the jobs, training for a time, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retreever import ReTreever, TransformerCA
from retreever.cli import main
from retreever.errors import BackendError
from retreever.lab.bench.jobs import co2, jobs, summary, training

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
    found = {name: gaps.judged([answer(batch)], [batch]) for name, answer in answers.items()}
    assert found["Gaussian process"]["score"] < 0.15 < found["straight line"]["score"]
    assert "likelihood" not in found["straight line"] and found["Gaussian process"]["likelihood"] > 0.5


def test_likelihoods_are_per_unit_and_of_hidden_weeks_alone(gaps: co2.Gaps) -> None:
    batch = gaps.tests()[0]
    dist = torch.distributions.Normal(batch.yt.masked_fill(~batch.target_mask[..., None], 50.0), 0.5)
    found = gaps.judged([torch.distributions.Independent(dist, 1)], [batch])
    of_one_ppm = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.0))  # 0.5 of 2 ppm
    assert found == {"score": 0, "likelihood": pytest.approx(float(of_one_ppm), abs=1e-5)}


def test_neighbours_of_one_point_are_its_value() -> None:
    job = jobs.Field(64)
    batch = job.sample(2, torch.Generator().manual_seed(0))
    nearest = torch.cdist(batch.xt, batch.xc).argmin(dim=-1)
    torch.testing.assert_close(jobs.neighbours(batch, 1)[..., 0], batch.yc[..., 0].gather(1, nearest))
    assert job.error(jobs.best_neighbours(job)(batch), batch)[0] < job.error(torch.zeros_like(batch.yt), batch)[0]


def test_most_training_fields_of_a_large_job_are_smaller() -> None:
    job, generator = jobs.Field(5_000), torch.Generator().manual_seed(0)
    sizes = [job.sample(job.batch, generator).xc.shape[:2] for _ in range(24)]
    assert set(sizes) == {(4, 4096), (3, 5000)} and sizes.count((4, 4096)) > 12
    assert {batch.xc.shape[1] for batch in job.tests(2)} == {5_000}


def test_looking_up_the_nearest_is_always_right() -> None:
    job = jobs.Nearest(n=32)
    (answer,) = job.usual().values()
    assert job.judged([answer(batch) for batch in job.tests()], job.tests()) == {"score": 100}


def test_digits_and_photo_come_from_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    digits, photo = jobs.Digits(), jobs.Photo()
    (answer,) = digits.usual().values()
    assert digits.judged([answer(batch) for batch in digits.tests()], digits.tests())["score"] > 95
    batch = photo.sample(2, torch.Generator().manual_seed(0)).validate()
    assert batch.xc.shape == (2, 512, 2) and batch.yt.shape == (2, 256, 3) and float(batch.xc.abs().max()) <= 1


@pytest.mark.parametrize("learn", ["nodes", "all"])
def test_training_ends_with_its_time_and_the_stages_end_in_a_tree(learn: Any) -> None:
    job = jobs.Field(64)
    first = training.train(job, TransformerCA(**job.fields), 0.05, 0, CPU)
    tree = training.staged(job, 0.2, 0, CPU, learn, 9)
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
    assert main([*words, "--seeds", "0", "--methods", "all tokens", "Perceiver IO"]) == 0
    trained = {row["trained"] for row in json.loads((tmp_path / "jobs-cpu.json").read_text())["rows"]}
    assert trained == {"nearest neighbour", "all tokens", "Perceiver IO"}
    assert main([*words, "--seeds", "0", "--resume"]) == 0
    before = json.loads((tmp_path / "jobs-cpu.json").read_text())["rows"]
    capsys.readouterr()
    assert main([*words, "--seeds", "0", "1", "--resume"]) == 0
    assert "seed 0" not in capsys.readouterr().err
    after = json.loads((tmp_path / "jobs-cpu.json").read_text())["rows"]
    assert [row for row in after if row["seed"] != 1] == before
    assert {row["trained"] for row in after if row["seed"] == 1} == {row["trained"] for row in before[1:]}
    assert main([*words[:2], "--seconds", "0.03", *words[4:], "--seeds", "0", "--resume"]) == 2
    assert "resume: expected an earlier run with" in capsys.readouterr().err


def test_methods_are_compared_over_the_seeds_they_have() -> None:
    """All tokens have 2 and 4: a method with the second seed alone has half of its score, not two thirds."""
    where = {"job": "nearest", "n": 2, "measure": "accuracy", "smaller": False}
    scores = [("all tokens", 0, 2.0), ("all tokens", 1, 4.0), ("tree", 1, 2.0), ("usual", None, 6.0), ("other", 2, 1.0)]
    found = summary([{**where, "method": name, "seed": seed, "score": score} for name, seed, score in scores])
    assert {row["method"]: row.get("ratio") for row in found} == {
        "all tokens": 1.0, "tree": 0.5, "usual": 2.0, "other": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{", '{"machine": 1}', '{"machine": {"threads": 1}, "rows": []}', "\udcff"],
)
def test_results_that_are_not_results_are_not_resumed(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "jobs-cpu.json"
    file.write_bytes(damage.encode("utf-8", "surrogateescape"))
    words = ["bench", "jobs", "--device", "cpu", "--only", "nearest", "--seconds", "0.01", "--out", str(tmp_path)]
    assert main([*words, "--resume"]) == 2
    assert "resume: expected results of an earlier run in" in capsys.readouterr().err
    assert file.read_bytes() == damage.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0", "0"], "seeds: expected at least one value, all different, got 0 0"),
        (["--seeds", "-1"], "seeds: expected an int >= 0"),
        (["--seconds", "nan"], "seconds: expected a number"),
        (["--resume", "--overwrite"], "resume: expected either resume or overwrite, got both"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "jobs", "--only", "nearest", "--out", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def _absent() -> jobs.Job:
    raise BackendError("statsmodels: expected the package, got none")
