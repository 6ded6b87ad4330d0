"""The data benchmark: tasks whose files are here, the fastest model of each, and the others named as left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retreever.errors import InputError
from retreever.lab.bench.data import DATA, data_table, verdicts
from retreever.lab.bench.options import DataBench
from retreever.lab.bench.report import Run


def test_from_options_to_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    DataBench(out=tmp_path, device="cpu", samples=3, seconds=0.01, batch=2, quick=True, data=tmp_path).run()
    result = json.loads((tmp_path / "data-cpu.json").read_text())
    assert {(row["task"], row["method"]) for row in result["rows"]} == {
        *(("copy", method) for method in (DATA, "ca", "tca", "perceiver-io")),
        *(("gp", method) for method in (DATA, "transformer-ca", "retreever", "perceiver-io")),
    }
    assert all(row["us"] > 0 and row["batch"] == 2 for row in result["rows"])
    assert set(result["summary"]["skipped"]) == {"emnist", "celeba", "activity"}
    assert result["summary"]["slowest_ratio"] == min(row["ratio"] for row in result["summary"]["tasks"])
    assert "emnist: left out: " in capfd.readouterr().err
    assert "left out, files absent: emnist, celeba, activity" in (tmp_path / "data-cpu.md").read_text()


def row(task: str, method: str, us: float) -> dict[str, Any]:
    return {"task": task, "method": method, "us": us, "batch": 10}


def test_data_is_held_against_the_fastest_model_without_its_data(tmp_path: Path) -> None:
    rows = [
        row("a", DATA, 10.0),
        row("a", "slow", 900.0),
        row("a", "fast", 60.0),
        row("b", DATA, 10.0),
        row("b", "x", 25.0),
    ]
    first, second = verdicts(rows)
    assert (first["model"], first["ratio"], second["ratio"]) == ("fast", 5.0, 1.5)
    table = data_table(Run.start("data", DataBench(out=tmp_path, device="cpu")), rows, {})
    assert [line[-1] for line in table.rows] == ["5.00x", "1.50x (too slow)"]
    assert table.rows[0][3] == "1,000,000"


def test_sizes_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^batch: expected an int >= 0"):
        DataBench(out=tmp_path, batch=-1).run()
