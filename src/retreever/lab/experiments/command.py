"""Implementation of the commands on tables: list, print, draw, train missing runs, collect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.errors import ConfigError
from retreever.lab.experiments.collect import collect
from retreever.lab.experiments.recipe import TableRecipe, find_recipe, recipes_in
from retreever.lab.experiments.results import Entry, load_results
from retreever.lab.experiments.results_page import figure_file
from retreever.lab.experiments.rows import Row, load_paper, load_rows, rows_of
from retreever.lab.experiments.table import make_table
from retreever.lab.figures.tables import Curve, draw_curve_panels, draw_scores_against_tokens

if TYPE_CHECKING:
    from retreever.lab.experiments.options import Collect, Experiment
    from retreever.lab.experiments.planned import PlannedRun


def list_tables(as_json: bool, folder: Path) -> None:
    """Print the name, title and number of finished cells of every table."""
    recipes, paper, results = recipes_in(folder), load_paper(folder), load_results(folder)
    lines = []
    for name, recipe in recipes.items():
        rows = rows_of(recipe, paper, results)
        done = sum(row.mean is not None for row in rows)
        lines.append({"name": name, "title": recipe.title, "cells": len(rows), "run": done})
    if as_json:
        print(json.dumps(lines, indent=1))
        return
    width = max(len(str(line["name"])) for line in lines)
    for line in lines:
        print(f"{line['name']:<{width}}  {line['title']} ({line['run']} of {line['cells']} cells run)")


def print_table(name: str, as_json: bool, folder: Path) -> None:
    """Print a table: in colour in a terminal, as Markdown when piped, or its rows as JSON; without a name, list all."""
    if not name:
        return list_tables(as_json, folder)
    recipe = find_recipe(folder, name)
    rows = load_rows(recipe, folder)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        make_table(recipe, rows).show()


def draw(name: str, out: Path | None, folder: Path, time: bool = False) -> None:
    """Draw the figure of a table and print its file name; without a name, list the tables."""
    if not name:
        return list_tables(False, folder)
    recipe = find_recipe(folder, name)
    usual = figure_file(recipe, folder.parent / "docs")
    if time:
        written = draw_times(recipe, folder, out or usual.with_name(f"{usual.stem}-time.png"))
    else:
        written = draw_figure(recipe, folder, out or usual)
    print(f"written: {written}")


def draw_times(recipe: TableRecipe, folder: Path, out: Path) -> Path:
    """Draw scores against the time of a prediction to the PNG `out`."""
    timed = [row for row in load_rows(recipe, folder) if row.times and row.mean is not None]
    if not timed:
        raise ConfigError(
            f"name: expected a table with times (retreever bench models) and results, got {recipe.name!r}"
        )
    points = [{**row, "tokens": row["us"], "paper": None, "paper_std": None} for row in map(Row.to_json, timed)]
    return draw_scores_against_tokens(points, out, score=recipe.metric, title=recipe.title, cost="µs per prediction")


def draw_figure(recipe: TableRecipe, folder: Path, out: Path) -> Path:
    """Draw the figure of the recipe to the PNG `out`."""
    if recipe.figure == "tokens":
        points = token_points(recipe, load_rows(recipe, folder))
        return draw_scores_against_tokens(points, out, score=recipe.metric, title=recipe.title)
    if recipe.figure == "curves":
        curves = curves_of(recipe, load_results(folder))
        return draw_curve_panels(curves, out, f"validation {recipe.metric}", recipe.title)
    drawn = ", ".join(name for name, other in recipes_in(folder).items() if other.figure)
    raise ConfigError(f"name: expected a table with a figure ({drawn}), got {recipe.name!r}")


def token_points(recipe: TableRecipe, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with a number of tokens; for rows not run, from the paper's percentage of the context."""
    contexts = [cell.runs[0].recipe.task.context if cell.runs else None for cell in recipe.cells]
    placed = [_placed(row, context) for row, context in zip(rows, contexts, strict=True)]
    return [row.to_json() for row in placed if row.tokens]


def _placed(row: Row, context: int | None) -> Row:
    share = row.printed.tokens_percent if row.printed else None
    if row.mean is None and share is not None and context is not None:
        return replace(row, tokens=round(share / 100 * context))
    return row


def curves_of(recipe: TableRecipe, results: Mapping[str, Entry]) -> dict[str, dict[str, list[Curve]]]:
    """Learning curves by column and system, one per seed with results; systems that read all leaves have none."""
    curves: dict[str, dict[str, list[Curve]]] = {}
    for cell in (cell for cell in recipe.cells if not cell.system.full):
        found = [results[run.name]["curve"] for run in cell.runs if run.name in results]
        drawn: list[Curve] = [[(step, value) for step, value, _ in curve] for curve in found if curve]
        if drawn:
            curves.setdefault(cell.column.name, {})[cell.system.name] = drawn
    if not curves:
        raise ConfigError(f"name: expected collected runs of {recipe.name}, got none (retreever experiment)")
    return curves


def run_experiment(options: Experiment) -> None:
    """Train the missing runs of a table, collect them and print the table; without a name, list the tables."""
    from retreever.lab.experiments.computed import compute
    from retreever.lab.recipes.command import train

    if not options.name:
        return list_tables(False, options.experiments)
    recipe = find_recipe(options.experiments, options.name)
    if recipe.measured:
        raise ConfigError(f"name: expected a table that is trained, got {recipe.name!r} (see retreever bench)")
    planned = recipe.chosen(options.only, options.columns, options.seeds)
    where = replace(options, resume=not options.overwrite)  # finished runs are kept, stopped ones resumed
    train([run.recipe for run in planned if not run.computed], where)
    for run in planned:
        if run.computed:
            compute(run, options.out, options.data, options.overwrite)
    again = options.replace or options.overwrite
    collect(planned, options.out, options.experiments, options.data_note, again)
    print_table(options.name, False, options.experiments)


def collect_runs(options: Collect) -> None:
    """Collect all finished runs that some table needs."""
    if not options.runs.is_dir():
        raise ConfigError(f"runs: expected a folder of run folders, got {options.runs}")
    needed: dict[str, PlannedRun] = {}
    for recipe in recipes_in(options.experiments).values():
        needed |= {run.name: run for cell in recipe.cells for run in cell.runs}
    names = collect(needed.values(), options.runs, options.experiments, options.data_note, options.replace)
    others = sum(1 for path in options.runs.glob("*/config.json") if path.parent.name not in names)
    print(f"collected {len(names)} runs; {others} others in {options.runs} are unfinished or belong to no table")
