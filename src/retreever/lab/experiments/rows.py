"""Rows of a table: the value the paper prints (experiments/paper.json) and ours, from result files, for every cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from retreever.errors import ConfigError
from retreever.lab.experiments.recipe import Cell, TableRecipe
from retreever.lab.experiments.results import Entry, load_results
from retreever.train.run import read_json

Timed = tuple[str, str, int]  # task, model, its latents or the width of its state


@dataclass(frozen=True)
class Printed:
    """One value of the paper; `mean` is None where it prints a word (OOM) instead of a number."""

    mean: float | None
    std: float | None
    text: str
    tokens_percent: float | None


@dataclass(frozen=True)
class Paper:
    """All tables of the paper: id -> rows."""

    file: Path
    tables: dict[str, list[dict[str, Any]]]

    def find(self, tables: Sequence[str], system: str, setting: dict[str, Any]) -> Printed | None:
        """The row of `system` with exactly this setting in the first table that has one; None if none has."""
        for name in tables:
            if name not in self.tables:
                raise ConfigError(f"{self.file}: expected a table {name!r}, got only {', '.join(self.tables)}")
            for row in self.tables[name]:
                if row["system"] == system and row["setting"] == setting:
                    return Printed(row["mean"], row["std"], row["printed"], row["tokens_percent"])
        return None


def load_paper(folder: Path) -> Paper:
    """The paper's numbers in the folder of the recipe files."""
    file = folder / "paper.json"
    try:
        return Paper(file, {table["id"]: table["rows"] for table in read_json(file)["tables"]})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: expected tables with id and rows, got {error!r}") from None


@dataclass(frozen=True)
class Times:
    """What a benchmark measured of a model: microseconds per prediction, and seconds per epoch of training."""

    us: float
    where: str
    epoch: float | None = None


@dataclass(frozen=True)
class Row:
    """One cell of a table. `mean` is None where nothing was run; `std` is over seeds, None for a single one."""

    system: str
    setting: str
    printed: Printed | None
    measured: bool = False  # by a benchmark, in time or memory
    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    planned: int = 0
    steps: tuple[int, int] = (0, 0)  # least and most
    tokens: int | None = None
    context: int | None = None
    hardware: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    times: Times | None = None
    parameters: int | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if self.printed is None or self.printed.mean is None or self.mean is None:
            return None
        return self.mean - self.printed.mean

    def to_json(self) -> dict[str, Any]:
        """The row as plain data; `steps` is the largest number over seeds."""
        printed = self.printed or Printed(None, None, "", None)
        return {
            "system": self.system,
            "setting": self.setting,
            "paper": printed.mean,
            "paper_std": printed.std,
            "mean": self.mean,
            "std": self.std,
            "difference": self.difference,
            "seeds": self.seeds,
            "steps": self.steps[1],
            "tokens": self.tokens,
            "context": self.context,
            "us": self.times.us if self.times else None,
            "epoch_s": self.times.epoch if self.times else None,
            "parameters": self.parameters,
            "paper_tokens_percent": printed.tokens_percent,
            "hardware": ", ".join(self.hardware) or None,
            "data": ", ".join(self.data) or None,
        }


def load_rows(recipe: TableRecipe, folder: Path) -> list[Row]:
    """All rows of a recipe, column after column."""
    return rows_of(recipe, load_paper(folder), load_results(folder))


def rows_of(recipe: TableRecipe, paper: Paper, results: Mapping[str, Entry]) -> list[Row]:
    """All rows of a recipe, column after column."""
    rows = []
    times = load_times(recipe.times)
    for cell in recipe.cells:
        system = cell.system.paper
        printed = paper.find(recipe.paper, system, cell.paper_setting) if system else None
        row = Row(cell.system.name, cell.column.name, printed, recipe.measured)
        row = _measured(row, cell, recipe) if recipe.measured else _trained(row, cell, results)
        rows.append(replace(row, times=times.get(_timed_as(cell))))
    return rows


def load_times(file: Path | None) -> dict[Timed, Times]:
    """Times by task, model and latents or state; empty where the benchmark was not run."""
    if file is None or not file.exists():
        return {}
    found = read_json(file)
    try:
        where, rows = _machine(found), found["rows"]
        if found["benchmark"] == "series":
            timed = [(row, Times(row["us"], where, row["epoch_s"])) for row in rows]
            return {("activity", row["method"], row["state"]): times for row, times in timed}
        predictions = [row for row in rows if row["method"] == "predict"]
        return {(row["task"], row["model"], row["latents"]): Times(row["us_per_target"], where) for row in predictions}
    except (KeyError, TypeError) as error:
        expected = "rows of `retreever bench models` or `retreever bench series`"
        raise ConfigError(f"{file}: expected {expected}, got {error!r}") from None


def _timed_as(cell: Cell) -> Timed:
    """What the benchmark calls the model of a cell; nothing for rows it does not time."""
    if not cell.runs or cell.system.full or cell.system.computed:
        return "", "", 0
    recipe = cell.runs[0].recipe
    return recipe.task.name, recipe.model.model, recipe.model.latents or recipe.model.state


def _trained(row: Row, cell: Cell, results: Mapping[str, Entry]) -> Row:
    """`row` with the results of the seeds of the cell."""
    found = [results[run.name] for run in cell.runs if run.name in results]
    for run in cell.runs:
        if run.name in results and cell.score not in results[run.name]["scores"]:
            have = ", ".join(results[run.name]["scores"])
            raise ConfigError(f"{run.name}: expected a score {cell.score!r}, got {have}")
    if not found:
        return replace(row, planned=len(cell.runs))
    scores = [float(entry["scores"][cell.score]) for entry in found]
    steps = [entry["steps"] for entry in found]
    return replace(
        row,
        mean=mean(scores),
        std=stdev(scores) if len(scores) > 1 else None,
        seeds=len(scores),
        planned=len(cell.runs),
        steps=(min(steps), max(steps)),
        tokens=found[0]["context" if cell.system.full else "tokens"],
        context=found[0]["context"],
        hardware=_distinct(entry["hardware"] for entry in found),
        data=_distinct(entry["data"] or "data not named" for entry in found),
        parameters=found[0].get("parameters"),
    )


def _measured(row: Row, cell: Cell, recipe: TableRecipe) -> Row:
    """`row` with the value of the benchmark row that matches the cell."""
    file = cell.column.file
    if file is None or not file.exists():
        return row
    bench = read_json(file)
    rows = bench.get("rows", ())
    hits = [found for found in rows if all(found.get(key) == value for key, value in cell.match.items())]
    if len(hits) > 1:
        raise ConfigError(f"{file}: expected one row with {cell.match}, got {len(hits)}")
    if not hits or hits[0].get(recipe.value) is None:
        return row
    return replace(
        row,
        mean=hits[0][recipe.value] * recipe.scale,
        tokens=hits[0].get("tokens"),
        context=hits[0].get("n"),
        hardware=(f"{_machine(bench)}, {bench['dtype']}",),
    )


def _machine(bench: dict[str, Any]) -> str:
    """Where a benchmark was run."""
    machine = bench["machine"]
    return str(machine.get("accelerator") or f"{machine['processor']}, {machine['threads']} threads")


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
