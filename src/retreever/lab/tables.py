"""Tables of results, printed as Markdown, as JSON or in a terminal."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retreever.arguments import reject
from retreever.errors import BackendError, one_line

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Cell = str | int | float | None

_NOTHING = "–"  # noqa: RUF001
_NUMERIC = re.compile(r"[-+−]?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|nan|inf)\s*(±\s*(\d+(\.\d+)?|nan|inf))?\s*[%×x]?", re.I)  # noqa: RUF001


def number(value: float | None, digits: int = 2) -> str:
    """`value` with a fixed number of decimals; never "-0.00"; a dash for None."""
    if value is None:
        return _NOTHING
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if text.startswith("-") and float(text) == 0 else text


def plus_minus(mean: float | None, std: float | None, digits: int = 2) -> str:
    """Mean ± standard deviation as the paper prints it; the mean alone where `std` is None."""
    return number(mean, digits) if mean is None or std is None else f"{number(mean, digits)} ± {number(std, digits)}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction of one as a percentage: 0.046 is "4.6%"."""
    return _NOTHING if fraction is None else f"{number(100 * fraction, digits)}%"


@dataclass(frozen=True)
class Table:
    """A titled table. Cells are text, numbers or None (nothing to show); columns of numbers are aligned right.

    All names of columns are different; notes are lines printed below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; lists become tuples
        set_field(self, "columns", tuple(self.columns))
        set_field(self, "rows", tuple(tuple(row) for row in self.rows))
        set_field(self, "notes", tuple(self.notes))
        if not self.columns or len(set(self.columns)) < len(self.columns):
            reject("columns", "at least one name, all different", self.columns)
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                reject(f"rows[{index}]", f"{len(self.columns)} cells", len(row))

    @property
    def right(self) -> tuple[bool, ...]:
        """Which columns hold numbers only."""
        texts = [[_text(row[i]) for row in self.rows if row[i] is not None] for i in range(len(self.columns))]
        return tuple(bool(column) and all(map(_is_number, column)) for column in texts)

    def to_markdown(self) -> str:
        """GitHub Markdown, padded so that it also reads well as plain text."""
        grid = [[_escape(_text(cell)) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*grid, strict=True)]
        head, *body = (_line(row, widths, self.right) for row in grid)
        rule = [
            "-" * (width - 1) + ":" if right else ":" + "-" * (width - 1)
            for width, right in zip(widths, self.right, strict=True)
        ]
        lines = [f"**{self.title}**", "", head, "| " + " | ".join(rule) + " |", *body]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, *notes]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Title, rows as dicts and notes. Numbers stay numbers; NaN and infinities, which JSON lacks, become None."""
        rows = [{name: _plain(cell) for name, cell in zip(self.columns, row, strict=True)} for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "notes": list(self.notes)}

    def show(self) -> None:
        """Print the table: in colour in a terminal, as Markdown when piped."""
        if sys.stdout.isatty():
            from rich.console import Console

            Console().print(self.to_rich())
        else:
            print(self.to_markdown(), end="")

    def to_rich(self) -> RichTable:
        """The table for a terminal: `rich.print(table.to_rich())`."""
        try:
            from rich.markup import escape
            from rich.table import Table as RichTable
        except ImportError as error:
            raise BackendError("tables in a terminal need the package rich; to_markdown() works without it") from error
        caption = "\n".join(self.notes)
        table = RichTable(title=escape(self.title), caption=escape(caption) or None, caption_justify="left")
        for name, right in zip(self.columns, self.right, strict=True):
            table.add_column(escape(name), justify="right" if right else "left", no_wrap=not right)
        for row in self.rows:
            table.add_row(*(escape(_text(cell)) for cell in row))
        return table


def _text(cell: Cell) -> str:
    if cell is None:
        return _NOTHING
    return number(cell) if isinstance(cell, float) else one_line(" ".join(str(cell).split()))


def _plain(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _is_number(text: str) -> bool:
    return text in (_NOTHING, "skipped") or _NUMERIC.fullmatch(text) is not None


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _line(cells: Iterable[str], widths: list[int], right: tuple[bool, ...]) -> str:
    padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
    return "| " + " | ".join(padded) + " |"
