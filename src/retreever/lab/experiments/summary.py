"""Summary of all tasks for the results page and the README: tree, all tokens and latents, ours and the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.experiments.paper import Paper
from retreever.lab.experiments.recipe import TableRecipe
from retreever.lab.experiments.results import Entry
from retreever.lab.experiments.rows import rows_of
from retreever.lab.experiments.table import COLUMNS
from retreever.lab.tables import Cell, Table

TABLES = ("copy", "long_copy", "gp", "images", "human_activity")
SYSTEMS = {  # column of the summary: keys of systems in the recipes
    "Tree": ("tca", "retreever"),
    "All tokens": ("ca", "transformer_ca"),
    "Perceiver IO": ("perceiver_io",),
}
SHOWN = ("Ours", "Paper")  # columns of the tables that the summary shows
START, END = "<!-- summary: made by `retreever results` -->", "<!-- end of summary -->"


def make_summary(recipes: Mapping[str, TableRecipe], paper: Paper, results: Mapping[str, Entry]) -> Table:
    """One row per task and setting that was run with a tree."""
    rows = [line for name in TABLES if name in recipes for line in _lines(recipes[name], paper, results)]
    columns = ("Task", "Metric", "Tokens read", *(title for name in SYSTEMS for title in (name, f"{name}, paper")))
    return Table("Ours and the paper's, mean ± standard deviation over seeds", columns, tuple(rows))


def put_summary(summary: Table, readme: Path) -> None:
    """Replace the text between the marks START and END of a README; a README without them is not changed."""
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if start and end:
        write_text(readme, f"{before}{START}\n{summary.to_markdown()}\n{END}{after}", ConfigError)


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
