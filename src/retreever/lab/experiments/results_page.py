"""The results page: every table of every recipe, generated from result files and the paper's numbers."""

from __future__ import annotations

import os
from pathlib import Path

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.experiments.paper import load_paper
from retreever.lab.experiments.recipe import TableRecipe, recipes_in
from retreever.lab.experiments.results import load_results
from retreever.lab.experiments.rows import Row, rows_of
from retreever.lab.experiments.summary import make_summary, put_summary
from retreever.lab.experiments.table import make_table

HEAD = """# Results

This page is made by `retreever results` from `experiments/results`, `benchmarks/results` and `experiments/paper.json`;
changes by hand are lost. "Paper" is what the paper prints, "Ours" the mean over seeds on test data; "not run" means
that nobody has, "within ±" that both standard deviations together cover the difference. `retreever table NAME` prints
one table, `retreever experiment NAME` trains what is missing in it.
"""


def write_results_page(folder: Path, out: Path) -> Path:
    """Write the page to `out`, with the figures in `images` beside it, and its summary into the README above."""
    recipes, paper, results = recipes_in(folder), load_paper(folder), load_results(folder)
    summary = make_summary(recipes, paper, results)
    put_summary(summary, out.parent.parent / "README.md")
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
