"""Learning curves by setting: every system has its colour, nothing is cut off, flat scores have an axis around them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retreever.errors import BackendError, InputError
from retreever.lab.figures.style import PALETTE, room_between
from retreever.lab.figures.tables import Panels, draw_curve_panels

image = pytest.importorskip("matplotlib.image")
numbers = st.floats(-1e6, 1e6)


def drawn(panels: Panels, file: Path) -> set[str]:
    """Colours of the palette that are in the picture."""
    pixels = (255 * image.imread(draw_curve_panels(panels, file, "accuracy in %", "Reward"))[..., :3]).round()
    assert (pixels[[0, -1]] == 255).all() and (pixels[:, [0, -1]] == 255).all()  # nothing touches the edge
    light = {c: [round(255 + 0.8 * (int(c[i : i + 2], 16) - 255)) for i in (1, 3, 5)] for c in PALETTE}
    return {c for c, rgb in light.items() if (abs(pixels - rgb).max(axis=-1) < 3).any()}


@pytest.mark.parametrize("settings", [1, 3, 4])
@pytest.mark.parametrize("systems", [1, 4])
def test_every_system_has_its_colour_and_nothing_is_cut_off(settings: int, systems: int, tmp_path: Path) -> None:
    curve = [(500, 10.0), (1_000, 90.0), (1_500, 100.0)]
    panels = {
        f"N = {n}": {f"a system with a long name, {s}": [[(x, y - 20 * s) for x, y in curve]] for s in range(systems)}
        for n in range(settings)
    }
    assert drawn(panels, tmp_path / "curves.png") >= set(PALETTE[:systems])


def test_what_has_no_curve_is_left_out(tmp_path: Path) -> None:
    panels = {"N = 1": {"TCA": [[(1, 2.0)], [(1, 3.0)]], "CA": []}, "N = 2": {"CA": []}}
    assert PALETTE[1] not in drawn(panels, tmp_path / "curves.png")
    with pytest.raises(InputError, match="panels: expected at least one curve, got none"):
        draw_curve_panels({"N = 2": {"CA": []}}, tmp_path / "none.png", "loss")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib.figure", "matplotlib.lines"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendError, match=r"retreever\[plot\]"):
        draw_curve_panels({"N = 1": {"TCA": [[(1, 2.0)]]}}, tmp_path / "curves.png", "loss")


@given(numbers, numbers)
def test_an_axis_is_never_narrower_than_the_scores_are_exact(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    bottom, top = room_between(low, high)
    assert bottom <= low and top >= high and top - bottom >= 0.0199 * max(abs(a), abs(b))
    if high - low > 0.02 * max(abs(a), abs(b)):
        assert (bottom, top) == (low, high)
