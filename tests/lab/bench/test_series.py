"""The benchmark of all models of Human Activity: what it measures, and what its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retreever.data.activity_file import FILE, TAGS
from retreever.lab.bench.options_models import SeriesBench
from retreever.lab.recipes.tasks import ActivitySettings

START = 633_790_226_051_280_329


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five recordings of 120 time points."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "person_activity").mkdir()
    rows = [
        f"A0{number},{TAGS[i % 4]},{START + 270_000 * i},27.05.2009 14:03:25:128,1,2,{i % 7},walking\n"
        for number in range(1, 6)
        for i in range(120)
    ]
    (folder / "person_activity" / FILE).write_text("".join(rows))
    return folder


def test_it_measures_training_and_answers(data: Path, tmp_path: Path) -> None:
    models = ("mtand-enc", "grud", "grud-16", "latent-ode-rnn")
    SeriesBench(out=tmp_path, models=models, batch=2, data=data, device="cpu", samples=3, seconds=0.01).run()
    result = json.loads((tmp_path / "series-cpu.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert tuple(rows) == models and rows["mtand-enc"]["parameters"] == 1_627_659
    assert (rows["grud-16"]["method"], rows["grud-16"]["state"], rows["grud"]["state"]) == ("grud", 16, 128)
    assert rows["latent-ode-rnn"]["evaluations"] == 49 and rows["grud"]["evaluations"] is None
    assert all(row["us"] > 0 and row["epoch_s"] > 0 and not row["graph"] for row in rows.values())
    assert result["summary"]["times_mtand"][0] == {"name": "mtand-enc", "ratio": 1.0}
    text = (tmp_path / "series-cpu.md").read_text()
    assert "s an epoch" in text and "1,627,659" in text


def test_by_default_it_covers_all_models_of_the_task() -> None:
    assert sorted(SeriesBench().models) == sorted(ActivitySettings.models)
