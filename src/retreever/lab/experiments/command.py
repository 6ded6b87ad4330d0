"""Implementation of the commands on tables: list, print, draw, train missing runs, collect."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retreever.errors import ConfigError
from retreever.lab.experiments.collect import collect
from retreever.lab.experiments.figure import draw_figure
from retreever.lab.experiments.paper import load_paper
from retreever.lab.experiments.recipe import find_recipe, recipes_in
from retreever.lab.experiments.results import load_results
from retreever.lab.experiments.results_page import figure_file
from retreever.lab.experiments.rows import load_rows, rows_of
from retreever.lab.experiments.table import make_table

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
    """Print a table: in colour in a terminal, as Markdown when piped, or its rows as JSON."""
    recipe = find_recipe(folder, name)
    rows = load_rows(recipe, folder)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(make_table(recipe, rows).to_rich())
    else:
        print(make_table(recipe, rows).to_markdown(), end="")


def draw(name: str, out: Path | None, folder: Path) -> None:
    """Draw the figure of a table and print its file name."""
    recipe = find_recipe(folder, name)
    print(f"written: {draw_figure(recipe, folder, out or figure_file(recipe, folder.parent / 'docs'))}")


def run_experiment(options: Experiment) -> None:
    """Train the missing runs of a table, collect them and print the table."""
    from retreever.lab.experiments.computed import compute
    from retreever.lab.recipes.command import train

    recipe = find_recipe(options.experiments, options.name)
    if recipe.measured:
        raise ConfigError(f"name: expected a table that is trained, got {recipe.name!r} (see retreever bench)")
    planned = recipe.chosen(options.only, options.columns, options.seeds)
    where = options.where()
    train([run.recipe for run in planned if not run.computed], where)
    for run in planned:
        if run.computed:
            compute(run, where.out, where.data, where.overwrite)
    again = options.replace or options.overwrite
    collect(planned, where.out, options.experiments, options.data_note, again)
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
