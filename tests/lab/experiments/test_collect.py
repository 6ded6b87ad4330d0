"""From run folders to results: what is taken, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retreever.errors import ConfigError, InputError
from retreever.lab.experiments.collect import MOST_POINTS, learning_curve
from retreever.lab.experiments.options import Collect
from retreever.lab.experiments.results import load_results

MakeRun = Callable[..., Path]
BOTH = {"test": 70.5, "test, full": 80.25}


def collect(folder: Path, **others: object) -> dict[str, dict[str, object]]:
    """As the command does."""
    Collect(runs=folder.parent / "runs", experiments=folder, **others).run()  # type: ignore[arg-type]
    return load_results(folder)


def test_a_run_keeps_what_tables_need(folder: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("copy-8-tca-seed0", BOTH)
    (make_run("copy-8-ca-seed0", {"test": 1.0}, model="ca") / "result.json").unlink()  # not finished
    make_run("copy-16-tca-seed0", BOTH, n=16)  # of no table
    results = collect(folder)
    assert capsys.readouterr().out.startswith("collected 1 runs; 2 others")
    assert list(results) == ["copy-8-tca-seed0"]
    entry = results["copy-8-tca-seed0"]
    assert entry["scores"] == BOTH and entry["steps"] == 400 and entry["data"] == "generated"
    assert entry["settings"] == {"model": "tca", "n": 8, "preset": "default", "batch": 8}
    assert entry["curve"] == [[10, 51.0, 0.5], [20, 52.0, 1.0], [30, 53.0, 1.5]]
    assert (folder / "results" / "copy.json").read_text().count("\n") == 5


def test_collecting_adds_to_what_was_collected(folder: Path, make_run: MakeRun) -> None:
    make_run("copy-8-tca-seed0", BOTH)
    collect(folder)
    make_run("copy-8-tca-seed1", BOTH, seed=1)
    (folder.parent / "runs" / "copy-8-tca-seed0" / "result.json").unlink()
    assert set(collect(folder)) == {"copy-8-tca-seed0", "copy-8-tca-seed1"}


def test_other_scores_for_a_known_run_are_refused(folder: Path, make_run: MakeRun) -> None:
    run = make_run("copy-8-tca-seed0", BOTH)
    collect(folder)
    before = (folder / "results" / "copy.json").read_bytes()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "scores": {"test": 1.0}}))
    with pytest.raises(ConfigError, match=r"copy-8-tca-seed0: .* got others .--replace"):
        collect(folder)
    assert (folder / "results" / "copy.json").read_bytes() == before
    assert collect(folder, replace=True)["copy-8-tca-seed0"]["scores"] == {"test": 1.0}


@pytest.mark.parametrize("change", [{"model": "ca"}, {"n": 16}, {"seed": 3}, {"preset": "paper"}])
def test_a_folder_of_another_run_is_refused(folder: Path, make_run: MakeRun, change: dict[str, object]) -> None:
    make_run("copy-8-tca-seed0", BOTH, **change)
    with pytest.raises(ConfigError, match=f"expected the run of the recipe file, got another {next(iter(change))}"):
        collect(folder)
    assert not (folder / "results").exists()


def test_other_steps_are_no_other_run(folder: Path, make_run: MakeRun) -> None:
    """Recipes change; what a run was trained with is shown, not compared."""
    make_run("copy-8-tca-seed0", BOTH, steps=123, lr=0.5)
    assert collect(folder)["copy-8-tca-seed0"]["settings"]["steps"] == 123  # type: ignore[index]


def test_scores_that_are_no_numbers_are_refused(folder: Path, make_run: MakeRun) -> None:
    make_run("copy-8-tca-seed0", {"test": float("nan")})
    with pytest.raises(ConfigError, match=r"result\.json: expected scores"):
        collect(folder)


def test_data_is_named_by_who_trained(folder: Path, make_run: MakeRun) -> None:
    make_run("copy-8-tca-seed0", BOTH)
    assert collect(folder, data_note={"copy": "my own"})["copy-8-tca-seed0"]["data"] == "my own"
    with pytest.raises(InputError, match="data_note: expected one of copy, gp"):
        collect(folder, data_note={"chess": "games"})


def test_a_note_on_the_data_stays_when_collected_again(folder: Path, make_run: MakeRun) -> None:
    recipe = (folder / "small.toml").read_text().split("[systems.ca]")[0].replace('"copy"\n', '"activity"\n')
    (folder / "small.toml").write_text(f'{recipe}[systems.r]\nname = "R"\n[columns.p]\nname = "P"\n')
    make_run("activity-paper-retreever-seed0", BOTH, task="activity")
    assert collect(folder)["activity-paper-retreever-seed0"]["data"] is None
    assert collect(folder, data_note={"activity": "mine"})["activity-paper-retreever-seed0"]["data"] == "mine"
    assert collect(folder)["activity-paper-retreever-seed0"]["data"] == "mine"


def test_broken_files_are_one_line(folder: Path, make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="runs: expected a folder of run folders"):
        collect(folder)
    run = make_run("copy-8-tca-seed0", BOTH)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: expected lines with step, metric and seconds"):
        collect(folder)
    (folder / "results").mkdir()
    (folder / "results" / "copy.json").write_text('{"runs": {"copy-8-tca-seed0": {}}}')
    with pytest.raises(ConfigError, match=r"copy\.json: copy-8-tca-seed0: expected settings"):
        load_results(folder)


@pytest.mark.parametrize("line", [b"[" * 100_000, b"9" * 5_000, b"\xff"])
def test_metrics_that_cannot_be_read_are_one_line(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(line)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: expected lines with step, metric and seconds, got"):
        learning_curve(file)


def test_a_pipe_in_place_of_metrics_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be read: expected a regular file"):
        learning_curve(tmp_path / "metrics.jsonl")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(looks=st.integers(0, 700))
def test_curves_are_thinned_evenly_and_keep_their_end(tmp_path: Path, looks: int) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "metric": i / 3, "seconds": i / 7} for i in range(1, looks + 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [step for step, _, _ in learning_curve(file)]
    assert len(steps) <= MOST_POINTS and len(steps) >= min(looks, MOST_POINTS // 2)
    assert steps == sorted(steps) and (not looks or steps[-1] == looks)
    assert len({b - a for a, b in pairwise(steps)}) <= 1
