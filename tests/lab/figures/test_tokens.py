"""Scores against tokens: every value of every row is shown, at its tokens or right beside them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import multimode
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retreever.errors import InputError
from retreever.lab.figures.tables import axis_limits, draw_scores_against_tokens, panels_of, places_of, ticks_of

image = pytest.importorskip("matplotlib.image")
colors = pytest.importorskip("matplotlib.colors")
counts = st.lists(st.integers(1, 5_000), min_size=1, max_size=12)


def row(system: str, tokens: float, paper: float | None, mean: float | None, setting: str = "RBF") -> dict[str, Any]:
    return {"system": system, "setting": setting, "tokens": tokens, "paper": paper, "paper_std": 0.02} | {
        "mean": mean, "std": None if mean is None else 0.01
    }  # fmt: skip


ROWS = [
    row("Transformer + CA", 47, 1.35, 1.36),
    row("ReTreever", 7, 1.25, 1.33),
    row("Perceiver IO", 32, 1.2, None),
    row("Perceiver IO", 7, 1.06, 1.1),
    row("ReTreever", 7, None, 0.9, "Matern"),
    row("Random", 1, None, None, "Matern"),
]


def amount(file: Path, colour: str) -> int:
    """Pixels of exactly this colour."""
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = torch.tensor(image.imread(file))[..., :3]
    return int(((picture - torch.tensor(colors.to_rgb(colour))).abs().amax(dim=-1) < 0.01).sum())


def test_rows_are_sorted_into_panels_and_those_without_a_value_left_out() -> None:
    panels = panels_of(ROWS)
    assert list(panels) == ["RBF", "Matern"] and list(panels["Matern"]) == ["ReTreever"]
    assert list(panels["RBF"]) == ["Transformer + CA", "ReTreever", "Perceiver IO"]
    assert [r["tokens"] for r in panels["RBF"]["Perceiver IO"]] == [7, 32]


def test_markers_stand_at_their_tokens_or_side_by_side_around_them() -> None:
    places = places_of(panels_of(ROWS)["RBF"])
    assert len(places) == 7 and places["Perceiver IO", 32, False] == 32  # alone there
    around = [place for (_, tokens, _), place in places.items() if tokens == 7]
    assert len(set(around)) == 4 and math.prod(around) == pytest.approx(7**4)
    assert max(around) / min(around) < 1.4
    assert places["ReTreever", 7, False] < places["ReTreever", 7, True]


def test_many_markers_stay_near_their_tokens() -> None:
    rows = [{"system": f"{k}", "setting": "", "tokens": tokens, "mean": 1.0} for k in range(14) for tokens in (1, 47)]
    places = places_of(panels_of(rows)[""])
    assert all(35 < place < 63 for (_, tokens, _), place in places.items() if tokens == 47)


@given(counts)
def test_the_axis_holds_all_tokens_and_ticks_are_some_of_them(tokens: list[int]) -> None:
    low, high = axis_limits(tokens)
    assert low < min(tokens) and high > max(tokens) and high / low >= 3.99
    ticks = ticks_of(tokens)
    assert set(ticks) <= set(tokens) and ticks == sorted(ticks) and min(multimode(tokens)) in ticks
    assert all(b > 1.01 * a for a, b in pairwise(ticks))


def test_one_colour_per_system_and_what_was_not_run_is_not_shown(tmp_path: Path) -> None:
    file = draw_scores_against_tokens(ROWS, tmp_path / "new" / "tokens.png", title="GP regression")
    assert all(amount(file, colour) > 50 for colour in ("#0072b2", "#e69f00", "#009e73"))
    assert amount(file, "#d55e00") == 0  # Random: no value
    hollow = [r | {"mean": None} for r in ROWS[:1]]
    alone = draw_scores_against_tokens(hollow, tmp_path / "hollow.png", score="accuracy")
    filled = draw_scores_against_tokens([ROWS[0] | {"paper": None}], tmp_path / "filled.png", score="accuracy")
    assert amount(alone, "#0072b2") < amount(filled, "#0072b2")


@pytest.mark.parametrize("settings", [1, 4, 5])
def test_any_number_of_settings_and_systems_is_drawn(tmp_path: Path, settings: int) -> None:
    rows = [row(f"system {i}", 2**i, i, i, f"N = {s}") for s in range(settings) for i in range(9)]
    assert draw_scores_against_tokens(rows, tmp_path / "many.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "rows: expected at least one"),
        ([ROWS[-1]], "rows: expected at least one"),
    ],
)
def test_rows_that_cannot_be_drawn_are_named(tmp_path: Path, rows: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        draw_scores_against_tokens(rows, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
