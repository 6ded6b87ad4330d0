"""Figures of a table: scores against tokens read, or learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retreever.errors import ConfigError
from retreever.experiments.recipe import Cell, Recipe
from retreever.experiments.results import Entry, load_results
from retreever.experiments.rows import Row, load_rows


def draw_figure(recipe: Recipe, folder: Path, out: Path) -> Path:
    """Draw the figure the recipe file asks for to the PNG `out`."""
    from retreever.report.figures import draw_curves
    from retreever.report.tokens_figure import draw_scores_against_tokens

    if recipe.figure == "tokens":
        points = token_points(recipe, load_rows(recipe, folder))
        return draw_scores_against_tokens(points, out, score=recipe.metric, title=recipe.title)
    if recipe.figure == "curves":
        histories = curves_of(recipe, load_results(folder))
        return draw_curves(histories, out, metric=f"validation {recipe.metric}", title=recipe.title)
    raise ConfigError(f"name: expected a table with a figure, got {recipe.name!r}")


def token_points(recipe: Recipe, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows that read tokens; for those not run, as many as the paper's share of the context makes."""
    contexts = [cell.runs[0].settings.context if cell.runs else None for cell in recipe.cells]
    placed = [_placed(row, context) for row, context in zip(rows, contexts, strict=True)]
    return [row.to_json() for row in placed if row.tokens]


def _placed(row: Row, context: int | None) -> Row:
    share = row.printed.tokens_percent if row.printed else None
    if row.mean is None and share is not None and context is not None:
        return replace(row, tokens=round(share / 100 * context))
    return row


def curves_of(recipe: Recipe, results: Mapping[str, Entry]) -> dict[str, list[dict[str, float]]]:
    """Learning curves by system (and column and seed where there are several)."""
    curves: dict[str, list[dict[str, float]]] = {}
    columns = len({cell.column.key for cell in recipe.cells})
    for cell in recipe.cells:
        for run in cell.runs:
            if run.name in results and results[run.name]["curve"]:
                label = _label(cell, run.settings.seed, columns)
                points = results[run.name]["curve"]
                curves[label] = [
                    {"step": step, f"validation {recipe.metric}": value, "seconds": seconds}
                    for step, value, seconds in points
                ]
    if not curves:
        raise ConfigError(f"name: expected collected runs of {recipe.name}, got none (retreever experiment)")
    return curves


def _label(cell: Cell, seed: int, columns: int) -> str:
    column = f", {cell.column.name}" if columns > 1 else ""
    return f"{cell.system.name}{column}" + (f", seed {seed}" if len(cell.runs) > 1 else "")
