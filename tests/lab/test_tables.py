"""Tables print the same numbers everywhere and refuse to be ragged."""

from __future__ import annotations

import io
import json
import math

import pytest

from retreever.errors import InputError
from retreever.lab.tables import Table, number, percent, plus_minus

TABLE = Table(
    title="Copy task",
    columns=("method", "tokens", "accuracy"),
    rows=(("ReTreever", 9, "99.8 ± 0.1"), ("a|b", 256, None)),
    notes=("Five seeds.",),
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (number(3.14159), "3.14"),
        (number(-0.001), "0.00"),
        (number(-1.5, 1), "-1.5"),
        (number(None), "–"),  # noqa: RUF001
        (number(math.nan), "nan"),
        (plus_minus(3.881, 0.0149), "3.88 ± 0.01"),
        (plus_minus(3.881, None, 1), "3.9"),
        (percent(0.046), "4.6%"),
        (percent(1, 0), "100%"),
        (percent(None), "–"),  # noqa: RUF001
    ],
)
def test_numbers(text: str, want: str) -> None:
    assert text == want


def test_markdown() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "**Copy task**",
        "",
        "| method    | tokens |   accuracy |",
        "| :-------- | -----: | ---------: |",
        "| ReTreever |      9 | 99.8 ± 0.1 |",
        "| a\\|b      |    256 |          – |",  # noqa: RUF001
        "",
        "- Five seeds.",
    ]


@pytest.mark.parametrize("cell", [1, 2.5, "-1.50", "4.6%", "3.88 ± 0.01", "1.2e-05", "65,536", "2.1×", math.inf])  # noqa: RUF001
def test_columns_of_numbers_stand_right(cell: str | float) -> None:
    assert Table("t", ("c",), ((cell,), (None,))).right == (True,)


@pytest.mark.parametrize("cell", ["ReTreever", "5 seeds", "-", "", "v1.2"])
def test_columns_with_words_stand_left(cell: str) -> None:
    assert Table("t", ("c",), ((cell,), (1,))).right == (False,)


def test_json_keeps_numbers_and_stays_valid() -> None:
    told = Table("t", ("name", "value"), (("a", 0.123456), ("b", math.nan)), notes=("n",)).to_json()
    assert told["rows"] == [{"name": "a", "value": 0.123456}, {"name": "b", "value": None}]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_cells_from_elsewhere_are_printable_and_bounded() -> None:
    text = Table("t", ("a",), (("\x1b[2J\nred\ud800",), ("x" * 100_000,))).to_markdown()
    assert all(line.isprintable() and len(line) < 3_000 for line in text.split("\n")) and "\\x1b[2J red" in text


def test_rich_shows_every_cell_as_written() -> None:
    console = pytest.importorskip("rich.console").Console(width=80, file=io.StringIO())
    console.print(Table("T [bold]", ("name [x]",), (("[red]a",),), notes=("see [1]",)).to_rich())
    shown = console.file.getvalue()
    assert all(text in shown for text in ("T [bold]", "name [x]", "[red]a", "see [1]"))


def test_rows_come_as_lists_and_are_kept_as_tuples() -> None:
    assert Table("t", ["a", "b"], [[1, 2]]) == Table("t", ("a", "b"), ((1, 2),))  # type: ignore[arg-type]


def test_an_empty_table_still_prints() -> None:
    assert Table("t", ("a",), ()).to_markdown() == "**t**\n\n| a   |\n| :-- |\n"


@pytest.mark.parametrize(
    ("columns", "rows", "named"),
    [((), (), "columns"), (("a", "a"), (), "columns"), (("a", "b"), ((1, 2), (1,)), r"rows\[1\]")],
)
def test_ragged_or_nameless_tables_are_refused(columns: tuple[str, ...], rows: tuple[tuple[int]], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Table("t", columns, rows)
