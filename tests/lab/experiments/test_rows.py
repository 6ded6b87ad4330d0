"""Rows of tables: statistics over seeds, the paper beside them, and nothing where nothing was run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retreever.errors import ConfigError
from retreever.lab.experiments.command import curves_of, draw_figure, draw_times, token_points
from retreever.lab.experiments.recipe import load_recipe, recipes_in
from retreever.lab.experiments.results import Entry, check_entry, save_results
from retreever.lab.experiments.rows import Printed, Row, load_paper, load_rows, rows_of
from retreever.lab.experiments.table import difference, make_table

SHIPPED = Path(__file__).parents[3] / "experiments"
ALL = recipes_in(SHIPPED)


def entry(seed: int, steps: int = 400, hardware: str = "CPU", data: str | None = "generated", **scores: float) -> Entry:
    """A collected run."""
    named = {name.replace("_", ", "): value for name, value in scores.items()}
    return {
        "settings": {}, "seed": seed, "scores": named, "tokens": 3, "context": 4, "steps": steps, "seconds": 1.0,
        "hardware": hardware, "versions": {}, "data": data, "curve": [[10, 50.0, 0.5], [20, 60.0, 1.0]],
    }  # fmt: skip


scores_strategy = st.lists(st.floats(-100, 100), min_size=1, max_size=3)


@given(values=scores_strategy)
def test_mean_and_sample_standard_deviation_over_seeds(values: list[float]) -> None:
    results = {f"gp-rbf-retreever-seed{i}": entry(i, rbf=v, matern=v) for i, v in enumerate(values)}
    for result in results.values():
        result["scores"] |= {"rbf, full": 0.0, "matern, full": 0.0}
    rows = rows_of(ALL["gp"], load_paper(SHIPPED), results)
    row = next(row for row in rows if row.system == "ReTreever" and row.setting == "RBF")
    assert row.mean is not None and math.isclose(row.mean, np.mean(values), abs_tol=1e-9)
    assert row.seeds == len(values) and row.planned == 3
    assert (row.std is None) == (len(values) == 1)
    if row.std is not None:
        assert math.isclose(row.std, np.std(values, ddof=1), rel_tol=1e-6, abs_tol=1e-9)
    assert row.difference is not None and math.isclose(row.difference, row.mean - 1.25, abs_tol=1e-12)
    assert [row.mean for row in rows if row.system == "Transformer + CA"] == [None, None]


def test_full_reads_all_leaves_of_the_same_runs(folder: Path) -> None:
    recipe = load_recipe(folder / "small.toml")
    results = {"copy-8-tca-seed0": entry(0, test=70.0, test_full=75.0), "copy-8-tca-seed1": entry(1, 300, test=72.0)}
    results["copy-8-tca-seed1"]["scores"]["test, full"] = 76.0
    rows = {row.system: row for row in rows_of(recipe, load_paper(folder), results)}
    assert (rows["TCA"].mean, rows["TCA"].tokens) == (71.0, 3)
    assert (rows["TCA, all leaves"].mean, rows["TCA, all leaves"].tokens) == (75.5, 4)
    text = make_table(recipe, list(rows.values())).to_markdown()
    assert "71.00 ± 1.41" in text and "-9.00, worse" in text and "300 to 400" in text and "3 of 4 (75.0%)" in text
    assert text.count("not run") == 2 and "Hardware: CPU." in text and "Data: generated." in text


def test_json_rows_have_what_programs_ask_for(folder: Path) -> None:
    rows = [row.to_json() for row in load_rows(load_recipe(folder / "small.toml"), folder)]
    wanted = {"system", "setting", "paper", "paper_std", "mean", "std", "seeds", "steps", "tokens", "hardware"}
    assert all(wanted <= set(row) for row in rows)
    assert rows[0]["paper"] == 90.0 and rows[0]["mean"] is None and rows[0]["seeds"] == 0
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(
    ("ours", "measured", "text"),
    [
        (79.0, False, "-1.00, worse"),
        (81.5, False, "+1.50, better"),
        (80.001, False, "0.00"),
        (79.999, False, "0.00"),
        (79.96, False, "-0.04"),  # 80.0 in the paper's digits
        (79.94, False, "-0.06, worse, within ±"),
        (79.0, True, "-1.00, faster"),
        (81.0, True, "+1.00, slower"),
        (None, False, None),
    ],
)
def test_worse_is_called_worse(ours: float | None, measured: bool, text: str | None) -> None:
    row = Row("TCA", "N = 8", Printed(80.0, 0.5, "80.0 ± 0.5", 75.0), measured, mean=ours)
    assert difference(row) == text


@pytest.mark.parametrize(
    ("std", "text"),
    [(None, "-1.00, worse"), (0.4, "-1.00, worse"), (0.6, "-1.00, worse, within ±")],
)
def test_what_the_seeds_could_turn_round_is_said(std: float | None, text: str) -> None:
    row = Row("TCA", "N = 8", Printed(80.0, 0.5, "80.0 ± 0.5", 75.0), mean=79.0, std=std)
    assert difference(row) == text


def test_a_word_of_the_paper_is_shown_and_compared_with_nothing() -> None:
    row = Row("TCA", "N = 8", Printed(None, None, "OOM", 100.0), mean=1.0)
    assert row.difference is None and difference(row) is None
    assert "OOM" in make_table(ALL["copy"], [row]).to_markdown()


def test_what_differs_between_rows_gets_a_column() -> None:
    rows = [Row("a", "x", None, mean=1.0, hardware=("CPU",)), Row("b", "x", None, mean=1.0, hardware=("NVIDIA H200",))]
    assert "Hardware" in make_table(ALL["copy"], rows).columns
    assert "Hardware" not in make_table(ALL["copy"], rows[:1]).columns


def test_a_score_that_a_run_lacks_is_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="copy-8-tca-seed0: expected a score 'test', got other"):
        rows_of(load_recipe(folder / "small.toml"), load_paper(folder), {"copy-8-tca-seed0": entry(0, other=1.0)})


def test_scores_must_be_finite_numbers() -> None:
    for bad in (math.nan, math.inf, "5", True, 10**400):
        with pytest.raises(ConfigError, match="file: run: expected scores"):
            check_entry({**entry(0), "scores": {"test": bad}}, "file: run")
    with pytest.raises(ConfigError, match="got none of curve"):
        check_entry({k: v for k, v in entry(0, test=1.0).items() if k != "curve"}, "file: run")


BENCH = """
title = "Times"
metric = "ms"
value = "us"
scale = 0.001
[systems.tree]
name = "tree"
match = { method = "tree" }
[columns.8]
name = "n = 8"
file = "bench.json"
match = { n = 8 }
"""


SERIES = """
title = "Series"
task = "activity"
times = "series.json"

[systems.small]
name = "GRU-D, 16"
settings = { model = "grud", state = 16 }

[systems.large]
name = "GRU-D, 32"
settings = { model = "grud", state = 32 }

[columns.paper]
name = "the paper's split"
"""


def test_benchmarks_are_read_where_they_are(folder: Path) -> None:
    file = folder / "times.toml"
    file.write_text(BENCH)
    assert load_rows(load_recipe(file), folder)[0].mean is None
    machine = {"accelerator": None, "processor": "Z80", "threads": 1}
    rows = [{"method": "tree", "n": 8, "us": 1500.0}, {"method": "tree", "n": 16, "us": 2.0}]
    bench = {"machine": machine, "dtype": "float32", "rows": rows}
    (folder / "bench.json").write_text(json.dumps(bench))
    (row,) = load_rows(load_recipe(file), folder)
    assert row.mean == 1.5 and row.hardware == ("Z80, 1 threads, float32",) and row.context == 8
    (folder / "bench.json").write_text(json.dumps({**bench, "rows": rows * 2}))
    with pytest.raises(ConfigError, match="expected one row with"):
        load_rows(load_recipe(file), folder)


def test_times_of_predictions_stand_beside_the_scores(folder: Path, tmp_path: Path) -> None:
    """Of the models that were timed, not of those read over all leaves or computed."""
    file = folder / "small.toml"
    file.write_text('times = "models.json"\n' + file.read_text())
    results = {"copy-8-tca-seed0": entry(0, test=70.0, test_full=75.0)}
    assert [row.times for row in rows_of(load_recipe(file), load_paper(folder), results)] == [None] * 4
    row = {"task": "copy", "model": "tca", "latents": 0}
    times = [{**row, "method": "predict", "us_per_target": 12.345}, {**row, "method": "answer", "us_per_target": 1.0}]
    machine = {"accelerator": "Abacus"}
    (folder / "models.json").write_text(json.dumps({"benchmark": "models", "machine": machine, "rows": times}))
    recipe = load_recipe(file)
    rows = rows_of(recipe, load_paper(folder), results)
    assert [row.times and row.times.us for row in rows] == [None, 12.345, None, None]
    assert rows[1].to_json()["us"] == 12.345 and rows[0].to_json()["us"] is None
    text = make_table(recipe, rows).to_markdown()
    assert "µs per prediction" in text and "12.3" in text and "Times: Abacus." in text and "s per epoch" not in text
    with pytest.raises(ConfigError, match=r"expected a table with times .* and results, got 'small'"):
        draw_times(recipe, folder, tmp_path / "small.png")
    save_results(folder, "copy", results)
    pytest.importorskip("matplotlib")
    assert draw_times(recipe, folder, tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    (folder / "models.json").write_text(json.dumps({"rows": [{"method": "predict"}]}))
    with pytest.raises(ConfigError, match=r"expected rows of `retreever bench models` or .*, got KeyError"):
        load_rows(recipe, folder)


def test_epochs_and_parameters_stand_beside_the_accuracy_of_series(folder: Path) -> None:
    """Of models of the very size that was timed."""
    machine = {"accelerator": None, "processor": "Z80", "threads": 2}
    timed = {"method": "grud", "state": 16, "us": 415.0, "epoch_s": 7.62}
    (folder / "series.json").write_text(json.dumps({"benchmark": "series", "machine": machine, "rows": [timed]}))
    file = folder / "series.toml"
    file.write_text(SERIES)
    recipe = load_recipe(file)
    results = {run.name: entry(0, test=90.0) | {"parameters": 1234} for cell in recipe.cells for run in cell.runs}
    rows = rows_of(recipe, load_paper(folder), results)
    assert [row.to_json()["epoch_s"] for row in rows] == [7.62, None]
    lines = make_table(recipe, rows).to_markdown().splitlines()
    assert [("7.62" in line, "1,234" in line) for line in lines if "90.00" in line] == [(True, True), (False, True)]
    assert "Times: Z80, 2 threads." in "\n".join(lines)


def test_every_shipped_table_names_the_published_systems() -> None:
    """Nine neural processes with a number of the paper each, on GP regression, EMNIST digits and CelebA."""
    names = ("CNP", "CANP", "NP", "ANP", "BNP", "BANP", "TNP-D", "LBANP, 128 latents", "CMANP, 128 latents")
    for table, columns in (("gp", ("RBF", "Matern 5/2")), ("images", ("EMNIST, seen classes", "CelebA32"))):
        rows = {(row.system, row.setting): row for row in load_rows(ALL[table], SHIPPED)}
        for name in names:
            for column in columns:
                assert rows[name, column].printed is not None, (name, column)


def test_every_shipped_benchmark_table_is_measured() -> None:
    for recipe in ALL.values():
        if recipe.measured:
            assert all(row.mean is not None for row in load_rows(recipe, SHIPPED)), recipe.name


def test_points_not_run_stand_at_the_papers_tokens(folder: Path) -> None:
    recipe = load_recipe(folder / "small.toml")
    points = token_points(recipe, rows_of(recipe, load_paper(folder), {}))
    assert [(point["system"], point["tokens"]) for point in points] == [("Cross Attention", 4), ("TCA", 3)]


def test_figures_are_drawn(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe = load_recipe(folder / "small.toml")
    assert draw_figure(recipe, folder, tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="expected collected runs of reward, got none"):
        curves_of(ALL["reward"], {})
    with pytest.raises(ConfigError, match=r"expected a table with a figure \(copy, .*\), got 'memory'"):
        draw_figure(ALL["memory"], SHIPPED, tmp_path / "memory.png")
    curves = curves_of(recipe, {"copy-8-tca-seed1": entry(1, test=1.0)})
    assert [[name, list(panel)] for name, panel in curves.items()] == [["N = 8", ["TCA"]]]
    assert curves["N = 8"]["TCA"][0][1] == (20, 60.0)
