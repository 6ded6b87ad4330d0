"""A small table from nothing: train two seeds, stop, go on, collect, print, draw, and make the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retreever.errors import ConfigError
from retreever.lab.experiments.blocks import marks, speed_table
from retreever.lab.experiments.options import Experiment, Results, Table
from retreever.lab.experiments.recipe import recipes_in
from retreever.lab.experiments.results import load_results

BLOCK = re.compile(r"(<!-- (\w+): made by `retreever results` -->).*?(<!-- end of \2 -->)", re.S)
SHIPPED = Path(__file__).parents[3] / "experiments"
ALL = recipes_in(SHIPPED)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def experiment(folder: Path, **others: object) -> Experiment:
    return Experiment(name="small", experiments=folder, out=folder.parent / "runs", device="cpu", **others)  # type: ignore[arg-type]


def numbers_in(rows: list[dict[str, Any]]) -> set[str]:
    """As a page may show them: scores, deviations and differences rounded, counts and shares as they are."""
    values = [row[key] for row in rows for key in ("mean", "std", "difference") if row[key] is not None]
    counts = [str(row[key]) for row in rows for key in ("seeds", "steps", "tokens", "context")]
    shares = [f"{100 * row['tokens'] / row['context']:.1f}" for row in rows]
    return {f"{abs(value):.2f}" for value in values} | {*counts, *shares}


def test_from_recipe_to_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment(folder, only=("tca", "tca_full"), seeds=(0,)).run()
    first = load_results(folder)
    assert list(first) == ["copy-8-tca-seed0"] and len(first["copy-8-tca-seed0"]["curve"]) == 2
    finished = (folder.parent / "runs" / "copy-8-tca-seed0" / "result.json").stat().st_mtime_ns
    experiment(folder).run()
    assert (folder.parent / "runs" / "copy-8-tca-seed0" / "result.json").stat().st_mtime_ns == finished
    results = load_results(folder)
    assert results["copy-8-tca-seed0"] == first["copy-8-tca-seed0"]
    assert len(results) == 6 and results["copy-n8-random-guess-seed1"]["tokens"] == 0
    capsys.readouterr()
    Table("small", json=True, experiments=folder).run()
    rows = {row["system"]: row for row in json.loads(capsys.readouterr().out)}
    scores = [results[f"copy-8-tca-seed{seed}"]["scores"]["test"] for seed in (0, 1)]
    assert rows["TCA"]["mean"] == pytest.approx(sum(scores) / 2)
    assert rows["TCA"]["std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert rows["TCA"] | {"seeds": 2, "steps": 4, "tokens": 3, "paper": 80.0, "hardware": "CPU"} == rows["TCA"]
    assert 5 < rows["Random"]["mean"] < 12
    page = folder.parent / "docs" / "results.md"
    Results(page, folder).run()
    text = page.read_text()
    assert "`retreever results`" in text and "4 of 4 cells run" in text and "not run |" not in text
    cells = " ".join(line for line in text.splitlines() if line.startswith("|"))
    assert {*NUMBER.findall(cells)} <= numbers_in([*rows.values()]) | {*NUMBER.findall("90.0 ± 1.5, 80.0 ± 0.5, N = 8")}
    Table(experiments=folder).run()
    assert "Small copies (4 of 4 cells run)" in capsys.readouterr().out


def test_without_results_the_page_has_no_number_but_the_papers(folder: Path) -> None:
    page = folder.parent / "results.md"
    Results(page, folder).run()
    table = [line for line in page.read_text().splitlines() if line.startswith("|")]
    paper = json.loads((folder / "paper.json").read_text())
    printed = " ".join(row["printed"] for row in paper["tables"][0]["rows"])
    allowed = {*NUMBER.findall(printed), *NUMBER.findall("N = 8")}
    assert {*NUMBER.findall(" ".join(table))} <= allowed
    assert sum("not run" in line for line in table) == 4


def test_the_committed_page_is_what_the_committed_results_give(tmp_path: Path) -> None:
    """Nobody has typed a number into it."""
    docs = SHIPPED.parent / "docs"
    made = tmp_path / "docs" / "results.md"
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for picture in (docs / "images").glob("results-*.png"):
        (tmp_path / "docs" / "images" / picture.name).touch()
    pages = ("README.md", "docs/budgets.md", "docs/conversion.md")
    blocks = []
    for page in pages:
        text, count = BLOCK.subn(r"\1 typed \3", (SHIPPED.parent / page).read_text())
        blocks.append(count)
        (tmp_path / page).write_text(text)
    assert blocks == [4, 1, 1]
    Results(made, SHIPPED).run()
    assert made.read_text() == (docs / "results.md").read_text()
    for page in pages:
        assert (tmp_path / page).read_text() == (SHIPPED.parent / page).read_text(), page


def test_a_readme_without_a_place_for_the_summary_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    start, end = marks("summary")
    readme.write_text(f"{end} not here {start}")
    Results(tmp_path / "docs" / "results.md", SHIPPED).run()
    assert readme.read_text() == f"{end} not here {start}"


def bench_row(part: str, n: int, method: str, us: float | None) -> dict[str, Any]:
    return {"part": part, "n": n, "m": 256, "method": method, **({} if us is None else {"us": us})}


def test_speed_is_that_of_the_module_before_the_operator() -> None:
    """Columns that no row has, as in older files, are left out; calls that were skipped are empty."""
    machine = {"accelerator": "GPU", "processor": "CPU", "threads": 2}
    rows = [bench_row("operator", 64, "tree", 2.0), bench_row("operator", 64, "all tokens", 300.0)]
    rows += [bench_row("module", 64, "tree", 50.0), bench_row("module", 64, "all tokens", 40.0)]
    rows += [bench_row("operator", 128, "tree", 4.0), bench_row("operator", 128, "all tokens", None)]
    table = speed_table({"rows": rows, "machine": machine, "dtype": "bfloat16"})
    assert table.columns[1:4] == ("module, tree", "module, all tokens", "module, faster")
    assert table.rows[0] == ("64", "50.0", "40.0", "0.80x", "2.00", "300", "150x")
    assert table.rows[1] == ("128", None, None, None, "4.00", None, None)
    rows += [bench_row("operator", 64, "tree, 4x tokens", 6.0), bench_row("compiled module", 64, "tree", 10.0)]
    wider = speed_table({"rows": rows, "machine": machine, "dtype": "bfloat16"})
    assert "compiled module, tree" in wider.columns and wider.rows[0][-1] == "50.0x"


def test_measured_tables_are_not_trained() -> None:
    assert ALL["runtime"].measured
    with pytest.raises(ConfigError, match="expected a table that is trained, got 'runtime'"):
        Experiment(name="runtime", experiments=SHIPPED).run()


def test_options_load_no_torch() -> None:
    code = "import sys, retreever.lab.experiments.options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
