"""Tables of results: the paper's value, ours and the difference; "not run" where there is no result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from retreever.lab.experiments.recipe import TableRecipe
from retreever.lab.experiments.rows import Row
from retreever.lab.tables import Cell, Table, number, percent, plus_minus

COLUMNS: Mapping[str, Callable[[Row, int], Cell]] = {
    "System": lambda row, _: row.system,
    "Setting": lambda row, _: row.setting,
    "Paper": lambda row, _: None if row.printed is None else row.printed.text,
    "Ours": lambda row, digits: "not run" if row.mean is None else plus_minus(row.mean, row.std, digits),
    "Difference": lambda row, digits: difference(row, digits),
    "Tokens": lambda row, _: tokens(row),
    "Parameters": lambda row, _: f"{row.parameters:,}" if row.parameters else None,
    "µs per prediction": lambda row, _: quantity(row.times.us if row.times else None),
    "s per epoch": lambda row, _: quantity(row.times.epoch if row.times else None),
    "Seeds": lambda row, _: seeds(row),
    "Steps": lambda row, _: steps(row),
    "Times": lambda row, _: row.times.where if row.times else None,
    "Hardware": lambda row, _: "; ".join(row.hardware) or None,
    "Data": lambda row, _: "; ".join(row.data) or None,
}
ONCE = ("Times", "Hardware", "Data")  # noted below the table where all rows have the same value


def make_table(recipe: TableRecipe, rows: Sequence[Row]) -> Table:
    """The table of a recipe. Columns without values are dropped; values that all rows share are noted below."""
    columns = {name: [cell(row, recipe.digits) for row in rows] for name, cell in COLUMNS.items()}
    if not any(row.times and row.times.epoch for row in rows):
        del columns["Parameters"]  # it stands beside the cost of training alone
    notes = [recipe.about] if recipe.about else []
    for name in list(columns):
        values = {value for value in columns[name] if value is not None}
        if not values or (name in ONCE and len(values) == 1):
            del columns[name]
            notes += [f"{name}: {value}." for value in values]
    if not recipe.measured and any(row.seeds > 1 for row in rows):
        notes.append("± is the sample standard deviation over seeds.")
    title = f"{recipe.title} ({recipe.metric})"
    return Table(title, tuple(columns), tuple(zip(*columns.values(), strict=True)), tuple(notes))


def difference(row: Row, digits: int = 2) -> str | None:
    """Ours minus the paper's; "better" or "worse" where they differ in the digits the paper prints.

    "within ±" follows where the two standard deviations together cover it: other seeds could change the sign. Times are
    faster or slower, which compares machines, not methods.
    """
    if row.difference is None or row.mean is None or row.printed is None:
        return None
    text = number(row.difference, digits)
    shown = text if text.startswith("-") or float(text) == 0 else f"+{text}"
    decimals = len(row.printed.text.split()[0].partition(".")[2])
    if number(row.mean, decimals) == number(row.printed.mean, decimals):
        return shown
    less, more = ("faster", "slower") if row.measured else ("worse", "better")
    spread = (row.printed.std or 0.0) + (row.std or 0.0)
    return f"{shown}, {less if row.difference < 0 else more}{', within ±' if abs(row.difference) <= spread else ''}"


def tokens(row: Row) -> str | None:
    """Tokens read per query, and their share of the context."""
    if not row.tokens:
        return None
    return f"{row.tokens} of {row.context} ({percent(row.tokens / row.context)})" if row.context else str(row.tokens)


def quantity(us: float | None) -> str | None:
    """A time with two or three digits."""
    return None if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def seeds(row: Row) -> str | None:
    """Number of seeds with results, and of planned seeds if some are missing."""
    if not row.seeds:
        return None
    return str(row.seeds) if row.seeds == row.planned else f"{row.seeds} of {row.planned}"


def steps(row: Row) -> str | None:
    """Steps trained: one number, or the least and the most over seeds."""
    least, most = row.steps
    if not most:
        return None
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
