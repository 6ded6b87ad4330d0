"""Recipe files: the shipped ones fit together, and a mistake is one line that names file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retreever.errors import ConfigError, InputError
from retreever.lab.experiments.recipe import find_recipe, load_recipe, recipes_in
from retreever.lab.experiments.rows import load_paper

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "experiments"
ALL = recipes_in(SHIPPED)


def test_every_table_of_the_general_systems_has_a_recipe() -> None:
    trained = {name for name, recipe in ALL.items() if not recipe.measured}
    assert trained == {
        "copy", "long_copy", "gp", "images", "human_activity", "reward", "tree_design", "lambda_rl", "lambda_ca",
        "branching", "perceiver_latents",
    }  # fmt: skip
    assert set(ALL) - trained == {"runtime", "branching_time", "construction", "memory"}
    assert list(ALL)[:5] == ["copy", "long_copy", "gp", "images", "human_activity"]


def test_runs_of_one_name_are_one_run_in_all_tables() -> None:
    """Otherwise one table would show what another trained."""
    seen: dict[str, object] = {}
    for recipe in ALL.values():
        for cell in recipe.cells:
            for run in cell.runs:
                assert seen.setdefault(run.name, (run.recipe, run.computed)) == (run.recipe, run.computed)
    assert "copy-256-tca-rl0.1-seed0" in seen and "gp-exact-posterior-seed0" in seen


def test_the_papers_value_is_found_wherever_the_paper_has_one() -> None:
    paper = load_paper(SHIPPED)
    lost = []
    for name, recipe in ALL.items():
        for cell in recipe.cells:
            named = cell.system.paper and (cell.column.paper_setting or recipe.measured)
            if named and paper.find(recipe.paper, cell.system.paper, cell.paper_setting) is None:
                lost.append((name, cell.system.key, cell.column.key))
    assert lost == [("images", "retreever_full", "emnist")]


def test_the_papers_numbers_are_those_of_the_paper() -> None:
    source = ROOT.parent / "shared" / "paper" / "paper_numbers.json"
    if not source.exists():
        pytest.skip("the paper's numbers are not here to compare with")
    keys = ("system", "setting", "tokens_percent", "mean", "std", "printed")
    there = {
        t["id"]: [{k: row[k] for k in keys} for row in t["rows"]] for t in json.loads(source.read_text())["tables"]
    }
    ours = {name: [{k: row[k] for k in keys} for row in rows] for name, rows in load_paper(SHIPPED).tables.items()}
    assert ours == there


def test_a_system_may_have_columns_seeds_and_settings_of_its_own() -> None:
    cells = {(cell.system.key, cell.column.key): cell for cell in ALL["copy"].cells}
    assert ("perceiver_io_100", "1024") not in cells
    assert [run.name for run in cells["perceiver_io_100", "512"].runs] == ["copy-512-perceiver-io-512-seed0"]
    assert [run.recipe.train.seed for run in cells["perceiver_io_100", "256"].runs] == [0, 1, 2]
    gp = {(cell.system.key, cell.column.key): cell for cell in ALL["gp"].cells}
    assert gp["retreever_full", "matern"].score == "matern, full"
    assert gp["retreever_full", "matern"].runs == gp["retreever", "rbf"].runs


def test_filters_choose_runs_once() -> None:
    names = [run.name for run in ALL["gp"].chosen(("retreever", "retreever_full"), (), (0, 2))]
    assert names == ["gp-rbf-retreever-seed0", "gp-rbf-retreever-seed2"]
    assert len(ALL["copy"].chosen((), ("1024",), ())) == 5 * 3
    for filters in ((("tcaa",), (), ()), ((), ("12",), ()), ((), (), (7,))):
        with pytest.raises(InputError, match=r"(only|columns|seeds): expected some of .*, got"):
            ALL["copy"].chosen(*filters)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Small copies"', "", "title: expected a text, got nothing"),
        ('figure = "tokens"', 'figure = "pie"', "figure: expected one of tokens, curves, got 'pie'"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds: expected a list"),
        ("seeds = [0, 1]", "colour = 1", "colour: expected no such key, got 1"),
        ('model = "ca"', 'modle = "ca"', "ca in column 8.modle: expected a setting of copy"),
        ('model = "ca"', 'model = "retreever"', "ca in column 8.model: expected a model of the copy task"),
        ("n = 8 }\n", 'n = 8 }\nsystems = ["x"]\n', "columns.8.systems: expected keys of systems, got 'x'"),
        ("steps = 4", 'steps = "4"', "ca in column 8.steps: expected a whole number, got '4'"),
        ("full = true", "full = 1", "systems.tca_full.full: expected true or false, got 1"),
        ('computed = "random-guess"', 'computed = "magic"', "systems.random.computed: expected one of random-guess"),
        ("full = true", "columns = { 9 = {} }", "systems.tca_full.columns.9: expected settings for one of"),
        ("random-guess", "exact-posterior", "systems.random.computed: expected one for the task copy, got"),
        ('task = "copy"', "", "task: expected one"),
        ('task = "copy"', 'task = "chess"', "task: expected one of copy"),
        ("[columns.8]", "[columns", "expected readable TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_file_and_key(folder: Path, old: str, new: str, message: str) -> None:
    file = folder / "small.toml"
    right = file.read_text()
    assert old in right
    file.write_text(right.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_recipe(file)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value) and "\n" not in str(error.value)


def test_unknown_tables_and_folders_are_one_line(folder: Path) -> None:
    with pytest.raises(InputError, match="name: expected one of small, got 'large'"):
        find_recipe(folder, "large")
    with pytest.raises(InputError):
        find_recipe(folder, "../experiments/small")
    with pytest.raises(ConfigError, match="experiments: expected a folder with recipe files"):
        recipes_in(folder / "nowhere")


def test_whole_numbers_become_numbers_where_the_setting_is_one() -> None:
    runs = [cell.runs[0] for cell in ALL["lambda_rl"].cells]
    assert [type(run.recipe.search.lambda_rl) for run in runs] == [float] * 4
    assert runs[2].recipe == ALL["reward"].cells[2].runs[0].recipe
