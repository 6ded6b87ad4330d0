"""The scripts in examples/ run, and what they print is what they say."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def convert() -> Any:
    return load("convert_decoder")


SMALL = ("--steps", "2", "--tokens", "200", "--queries", "5", "--fields", "2")


def test_converting_a_decoder_prints_both_tables(convert: Any, capsys: pytest.CaptureFixture[str]) -> None:
    convert.main(list(SMALL))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 0, 2 steps in ")
    names = [
        "all tokens",
        *(f"tree, order {order}" for order in ("keys", "given, k-d", "given, random") for _ in "1248"),
    ]
    table = [(line[:26].strip(), line[26:].split()) for line in lines[3 : 3 + len(names)]]
    assert [name for name, _ in table] == names
    assert [cells[0] for _, cells in table] == ["200", *["2", "4", "8", "16"] * 3]
    assert all(0 < float(cells[2]) < 10 for _, cells in table)
    last = lines[-2].split()
    assert last[:3] == ["all", "200", "100.00%"] and float(last[3]) == 0 and "error at most 0.02: " in lines[-1]


def test_trees_of_the_example_that_read_all_tokens_predict_the_same(convert: Any) -> None:
    torch.manual_seed(0)
    model = convert.Model().eval()
    original = model.decoder.multihead_attn
    field = convert.sample(2, 50, 5, torch.Generator().manual_seed(0))
    exact, *trees = (score for _, _, score in convert.compare(model, field, [50]))
    assert trees == pytest.approx([exact] * 3, abs=1e-5) and model.decoder.multihead_attn is original
    assert max(abs(score - exact) for _, _, score in convert.compare(model, field, [1])) > 1e-5


def test_training_of_the_example_lowers_the_error(convert: Any) -> None:
    torch.manual_seed(0)
    model, field = convert.Model(), convert.sample(4, 64, 32, torch.Generator().manual_seed(5))
    before = convert.rmse(model, field)
    convert.train(model, 12, torch.Generator().manual_seed(0))
    assert convert.rmse(model, field) < before


@pytest.fixture(scope="module")
def fill() -> Any:
    return load("fill_gaps")


def seasons() -> torch.Tensor:
    """Weekly values with a trend, a yearly wave and a few missing weeks, as the file of the example has."""
    week = torch.arange(2284)
    ppm = 315 + 0.03 * week + 3 * torch.sin(2 * torch.pi * week / 52.18)
    return ppm.masked_fill(week % 97 == 5, torch.nan)


def test_filling_gaps_prints_a_line_for_every_way(
    fill: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fill, "read_co2", seasons)
    fill.main(["--steps", "2", "--models", "GRU-D", "mTAND-Enc", "--out", str(tmp_path / "gaps.png")])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:14].strip() for line in lines[:4]] == ["straight line", "GP", "GRU-D", "mTAND-Enc"]
    errors = [float(line.split("RMSE ")[1].split()[0]) for line in lines[:4]]
    assert errors[1] < 0.1 < errors[0]  # a line cannot bend, a yearly kernel knows the wave
    assert (tmp_path / "gaps.png").stat().st_size > 1_000


def test_hidden_weeks_of_the_example_are_targets_and_not_context(fill: Any) -> None:
    batch = fill.test_batch(seasons())
    assert batch.target_mask.any(dim=1).all() and not batch.target_mask[:, :46].any()
    assert not (batch.yc[..., 1].bool() & batch.target_mask).any() and not batch.yc[..., 0][batch.target_mask].any()


def test_lines_of_the_example_are_those_of_numpy(fill: Any) -> None:
    row = fill.test_batch(seasons()).rows(slice(3, 4))
    seen = row.yc[0, :, 1] > 0
    expected = np.interp(row.xt[0, :, 0], row.xc[0, seen, 0], row.yc[0, seen, 0])
    assert np.allclose(fill.line(row), expected, atol=1e-5)


def test_a_stream_is_predicted_and_appended_point_by_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small file in the format of the real one; the stream is longer than its series, and begins again."""
    stream = load("stream")
    rows = [
        f"A01,{tag},{time},27.05.2009 14:03:25:127,{time % 7 / 10},{time % 5 / 10},{time % 3 / 10},walking"
        for time in range(100)
        for tag in ("010-000-024-033", "010-000-030-096", "020-000-033-111", "020-000-032-221")
    ]
    (tmp_path / "ConfLongDemo_JSI.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    out = tmp_path / "stream.json"
    stream.main(["--data", str(tmp_path), "--points", "1300", "--updates", "2", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1,024", "1,200", "1,300"]
    written = json.loads(out.read_text())
    assert all(row["tree"] > 0 and row["ms"] > 0 for row in written["rows"])
