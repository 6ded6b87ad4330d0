"""Figures of a table: scores against tokens read, or learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retreever.errors import ConfigError
from retreever.lab.experiments.recipe import TableRecipe, recipes_in
from retreever.lab.experiments.results import Entry, load_results
from retreever.lab.experiments.rows import Row, load_rows
from retreever.lab.figures.table_curves import Curve, draw_curve_panels


def draw_figure(recipe: TableRecipe, folder: Path, out: Path) -> Path:
    """Draw the figure of the recipe to the PNG `out`."""
    from retreever.lab.figures.tokens import draw_scores_against_tokens

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
