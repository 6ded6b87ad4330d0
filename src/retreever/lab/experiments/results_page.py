"""The results page: every table of every recipe, generated from result files and the paper's numbers.

Its summary of all tasks (tree, all tokens and latents, ours and the paper's) also goes into the README, and tables of
benchmarks into the README and the pages beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.experiments.blocks import bench_blocks, put_blocks
from retreever.lab.experiments.recipe import TableRecipe, recipes_in
from retreever.lab.experiments.results import Entry, load_results
from retreever.lab.experiments.rows import Paper, Row, load_paper, rows_of
from retreever.lab.experiments.table import COLUMNS, make_table
from retreever.lab.tables import Cell, Table

TABLES = ("copy", "long_copy", "gp", "images", "human_activity")
SYSTEMS = {  # column of the summary: keys of systems in the recipes
    "Tree": ("tca", "retreever"),
    "All tokens": ("ca", "transformer_ca"),
    "Perceiver IO": ("perceiver_io",),
}
SHOWN = ("Ours", "Paper")  # columns of the tables that the summary shows
HEAD = """# Results

This page is made by `retreever results` from `experiments/results`, `benchmarks/results` and `experiments/paper.json`;
changes by hand are lost. "Paper" is what the paper prints, "Ours" the mean over seeds on test data. "Not run": no
result yet. "Within ±": both standard deviations together cover the difference. `retreever table NAME` prints one table,
`retreever experiment NAME` trains what is missing in it.
"""


def write_results_page(folder: Path, out: Path) -> Path:
    """Write the page to `out`, with the figures in `images` beside it.

    The summary and tables of benchmarks, from `benchmarks/results` beside `folder`, go into the README above and the
    pages beside it, where these have a place for them.
    """
    recipes, paper, results = recipes_in(folder), load_paper(folder), load_results(folder)
    summary = make_summary(recipes, paper, results)
    root, pages = out.parent.parent, sorted(out.parent.glob("*.md"))
    for page in (root / "README.md", *pages):
        link = "../benchmarks/results" if page in pages else "benchmarks/results"
        bench = bench_blocks(folder.parent / "benchmarks" / "results", link)
        put_blocks(page, {"summary": summary.to_markdown(), **bench})
    parts = [HEAD, "## At a glance\n", summary.to_markdown()]
    for recipe in recipes.values():
        rows = rows_of(recipe, paper, results)
        parts.append(_section(recipe, rows, out))
    return write_text(out, "\n".join(parts), ConfigError)


def figure_file(recipe: TableRecipe, docs: Path) -> Path:
    """The file of a recipe's figure on the page."""
    return docs / "images" / f"results-{recipe.name}.png"


def _section(recipe: TableRecipe, rows: list[Row], out: Path) -> str:
    picture = figure_file(recipe, out.parent)
    done = sum(row.mean is not None for row in rows)
    lines = [f"## {recipe.title}", "", f"`retreever table {recipe.name}`: {done} of {len(rows)} cells run.", ""]
    lines += [make_table(recipe, rows).to_markdown()]
    if recipe.figure and picture.exists():
        lines += [f"![{recipe.title}]({Path(os.path.relpath(picture, out.parent)).as_posix()})", ""]
    return "\n".join(lines)


def make_summary(recipes: Mapping[str, TableRecipe], paper: Paper, results: Mapping[str, Entry]) -> Table:
    """One row per task and setting that was run with a tree."""
    rows = [line for name in TABLES if name in recipes for line in _lines(recipes[name], paper, results)]
    columns = ("Task", "Metric", "Tokens read", *(title for name in SYSTEMS for title in (name, f"{name}, paper")))
    return Table("Ours and the paper's, mean ± standard deviation over seeds", columns, tuple(rows))


def _lines(recipe: TableRecipe, paper: Paper, results: Mapping[str, Entry]) -> list[tuple[Cell, ...]]:
    pairs = zip(recipe.cells, rows_of(recipe, paper, results), strict=True)
    lines = []
    for setting, group in groupby(pairs, key=lambda pair: pair[0].column.name):
        by_key = {cell.system.key: row for cell, row in group}
        found = [next((by_key[key] for key in keys if key in by_key), None) for keys in SYSTEMS.values()]
        tree = found[0]
        if tree is not None and tree.mean is not None:
            values = [None if row is None else COLUMNS[name](row, recipe.digits) for row in found for name in SHOWN]
            lines.append((f"{recipe.title}, {setting}", recipe.metric, f"{tree.tokens} of {tree.context}", *values))
    return lines
