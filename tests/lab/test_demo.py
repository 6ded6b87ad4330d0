"""The demo from end to end, with a few steps of training in place of a few hundred."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.errors import InputError
from retreever.lab import demo
from retreever.tasks.copy import CopyTask


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAIN", replace(demo.TRAIN, steps=2, batch=4, evaluate_every=1))
    monkeypatch.setattr(demo, "CopyTask", lambda n: CopyTask(n, test_sequences=8))


@pytest.mark.usefixtures("short")
def test_demo_leaves_table_pictures_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), "--n", "16"]) == 0
    printed = capsys.readouterr().out
    written = (tmp_path / "demo" / "README.md").read_text()
    for name in demo.NAMES:
        assert name in printed and name in written
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert {len(rows) for rows in result["history"].values()} == {2}
    assert result["seed"] == 0 and result["machine"]["torch"]
    tokens = {row["model"]: row["tokens"] for row in result["table"]["rows"]}
    assert tokens["Tree Cross Attention"] == tokens["Perceiver IO"] == "4"  # the same budget
    for picture in ("curves.png", "retrieval.png"):
        assert (tmp_path / "demo" / picture).stat().st_size > 10_000
        assert picture in written


@pytest.mark.usefixtures("short")
def test_a_budget_reads_the_same_tree_once_more(tmp_path: Path) -> None:
    assert main(["demo", "--out", str(tmp_path), "--n", "16", "--budget", "6"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(row["model"], row["tokens"]) for row in result["table"]["rows"][1:3]] == [
        ("Tree Cross Attention", "4"), ("Tree Cross Attention, budget 6", "6"),
    ]  # fmt: skip
    assert list(result["history"]) == list(demo.NAMES)
    assert len(json.loads((tmp_path / "retrieval.json").read_text())["selected"]) <= 6


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="--overwrite"):
        demo.run_demo(tmp_path)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_bad_length_is_refused_before_any_file_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "new"), "--n", "48"]) == 2
    assert capsys.readouterr().err == "retreever: n: expected a power of two from 4 to 32768, got 48\n"
    assert not (tmp_path / "new").exists()
