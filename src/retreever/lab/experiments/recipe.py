"""A recipe file: the systems (rows), settings (columns) and seeds of a table of the paper.

Every pair of a system and a column is a cell. The cells of most tables are trained; those of some are read from the
files of a benchmark. experiments/README.md describes the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retreever.arguments import reject
from retreever.errors import ConfigError, InputError
from retreever.lab.experiments.keys import Keys
from retreever.lab.experiments.planned import COMPUTED, PlannedRun, checked_settings
from retreever.lab.recipes.recipe import make_recipe
from retreever.lab.recipes.tasks import TASKS

FIGURES = ("tokens", "curves")
Values = dict[str, Any]


@dataclass(frozen=True)
class System:
    """A row of the table: a model, and its name in paper.json."""

    key: str
    name: str
    paper: str
    paper_setting: Values
    settings: Values
    full: bool
    computed: str
    match: Values
    columns: dict[str, Values]


@dataclass(frozen=True)
class Column:
    """A column of the table: a task or a size of it, and which score of a run is shown."""

    key: str
    name: str
    task: str
    score: str
    seeds: tuple[int, ...]
    paper_setting: Values
    settings: Values
    systems: tuple[str, ...]
    match: Values
    file: Path | None


@dataclass(frozen=True)
class Cell:
    """One system in one column. `runs` is empty where a benchmark is read."""

    system: System
    column: Column
    runs: tuple[PlannedRun, ...]

    @property
    def score(self) -> str:
        """Name of the score among those of a run."""
        return f"{self.column.score}, full" if self.system.full else self.column.score

    @property
    def paper_setting(self) -> Values:
        """The setting of the row in paper.json."""
        return {**self.column.paper_setting, **self.system.paper_setting}

    @property
    def match(self) -> Values:
        """Entries that identify the row of a benchmark."""
        return {**self.column.match, **self.system.match}


@dataclass(frozen=True)
class TableRecipe:
    """A table of the paper."""

    name: str
    title: str
    about: str
    place: int
    paper: tuple[str, ...]
    figure: str
    digits: int
    value: str
    scale: float
    metric: str
    cells: tuple[Cell, ...]
    times: Path | None = None  # file of `retreever bench models`

    @property
    def measured(self) -> bool:
        """Whether the table comes from benchmarks, where less is better."""
        return bool(self.value)

    def chosen(self, only: tuple[str, ...], columns: tuple[str, ...], seeds: tuple[int, ...]) -> list[PlannedRun]:
        """The runs of the cells that pass the filters, each once; an empty filter passes everything."""
        _known("only", only, [cell.system.key for cell in self.cells])
        _known("columns", columns, [cell.column.key for cell in self.cells])
        _known("seeds", seeds, [run.recipe.train.seed for cell in self.cells for run in cell.runs])
        cells = [cell for cell in self.cells if not only or cell.system.key in only]
        runs = [run for cell in cells if not columns or cell.column.key in columns for run in cell.runs]
        return list({run.name: run for run in runs if not seeds or run.recipe.train.seed in seeds}.values())


def recipes_in(folder: Path) -> dict[str, TableRecipe]:
    """All recipes of a folder by name, in the order of `place`."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        expected = "a folder with recipe files, as in a checkout of the repository"
        raise ConfigError(f"experiments: expected {expected}, got {folder} (--experiments says where it is)")
    found = [load_recipe(file) for file in files]
    return {recipe.name: recipe for recipe in sorted(found, key=lambda recipe: (recipe.place, recipe.name))}


def find_recipe(folder: Path, name: str) -> TableRecipe:
    """One recipe; others in the folder are not read unless the name is wrong."""
    if (folder / f"{name}.toml") in folder.glob("*.toml"):
        return load_recipe(folder / f"{name}.toml")
    return reject("name", "one of " + ", ".join(recipes_in(folder)), repr(name))


def load_recipe(file: Path) -> TableRecipe:
    """The recipe in `file`."""
    try:
        keys = Keys(tomllib.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected readable TOML, got {error}") from None
    title, about = keys.need("title", str), keys.take("about", str, "")
    place = keys.take("place", int, 99)
    paper = keys.take_list("paper", str)
    figure = keys.take_choice("figure", FIGURES)
    digits = keys.take("digits", int, 2)
    value, scale = keys.take("value", str, ""), keys.take("scale", float, 1.0)
    shared = {"task": keys.take_choice("task", tuple(TASKS)), "score": keys.take("score", str, "test")}
    shared |= {"seeds": keys.take_list("seeds", int, (0,)), "settings": keys.take("settings", dict, {})}
    columns = [_column(key, inner, shared, file) for key, inner in keys.take_tables("columns").items()]
    systems = [_system(key, inner, columns) for key, inner in keys.take_tables("systems").items()]
    metric = keys.take("metric", str, "") or _metric(keys, columns)
    times = keys.take("times", str, "")
    keys.finish()
    cells = tuple(_cells(systems, columns, keys, measured=bool(value)))
    return TableRecipe(
        file.stem, title, about, place, paper, figure, digits, value, float(scale), metric, cells,
        file.parent / times if times else None,
    )  # fmt: skip


def _column(key: str, keys: Keys, shared: Values, file: Path) -> Column:
    task = keys.take_choice("task", tuple(TASKS)) or shared["task"]
    bench = keys.take("file", str, "")
    column = Column(
        key=key,
        name=keys.need("name", str),
        task=task,
        score=keys.take("score", str, shared["score"]),
        seeds=keys.take_list("seeds", int, shared["seeds"]),
        paper_setting=keys.take("paper", dict, {}),
        settings={**shared["settings"], **keys.take("settings", dict, {})},
        systems=keys.take_list("systems", str),
        match=keys.take("match", dict, {}),
        file=file.parent / bench if bench else None,
    )
    keys.finish()
    return column


def _system(key: str, keys: Keys, columns: list[Column]) -> System:
    system = System(
        key=key,
        name=keys.need("name", str),
        paper=keys.take("paper", str, ""),
        paper_setting=keys.take("paper_setting", dict, {}),
        settings=keys.take("settings", dict, {}),
        full=keys.take("full", bool, False),
        computed=keys.take_choice("computed", tuple(COMPUTED)),
        match=keys.take("match", dict, {}),
        columns=keys.take("columns", dict, {}),
    )
    keys.finish()
    names = [column.key for column in columns]
    for name, changes in system.columns.items():
        if name not in names or not isinstance(changes, dict):
            keys.refuse(f"columns.{name}", "settings for one of the columns " + ", ".join(names), repr(changes))
    return system


def _metric(keys: Keys, columns: list[Column]) -> str:
    """The metric of the tasks of all columns, which must be the same."""
    metrics = {TASKS[column.task].metric for column in columns if column.task}
    if len(metrics) != 1:
        keys.refuse("task", "one, or several with the same metric (or a metric)", ", ".join(sorted(metrics)) or "none")
    return metrics.pop()


def _cells(systems: list[System], columns: list[Column], keys: Keys, measured: bool) -> Iterator[Cell]:
    for column in columns:
        for name in column.systems:
            if name not in [system.key for system in systems]:
                keys.refuse(f"columns.{column.key}.systems", "keys of systems", repr(name))
        for system in systems:
            listed = not column.systems or system.key in column.systems
            if listed and (not system.columns or column.key in system.columns):
                yield Cell(system, column, () if measured else _runs(system, column, keys))


def _runs(system: System, column: Column, keys: Keys) -> tuple[PlannedRun, ...]:
    inner = Keys(system.columns.get(column.key, {}), keys.file, f"systems.{system.key}.columns.{column.key}")
    seeds = inner.take_list("seeds", int, column.seeds)
    if column.task != COMPUTED.get(system.computed, column.task):
        keys.refuse(f"systems.{system.key}.computed", f"one for the task {column.task}", repr(system.computed))
    where = Keys({}, keys.file, f"{system.key} in column {column.key}")
    changes = checked_settings(column.task, {**column.settings, **system.settings, **inner.left}, where)
    try:
        recipes = [make_recipe(column.task, **changes, seed=seed) for seed in seeds]
    except InputError as error:
        raise ConfigError(f"{keys.file}: {where.where}.{error}") from None
    return tuple(PlannedRun(recipe, changes, system.computed) for recipe in recipes)


def _known(argument: str, names: tuple[Any, ...], known: list[Any]) -> None:
    for name in names:
        if name not in known:
            reject(argument, "some of " + ", ".join(map(str, dict.fromkeys(known))), repr(name))
