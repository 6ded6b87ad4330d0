"""Learning curves of many runs: a panel per setting, a colour per system, a line per seed.

Needs matplotlib (the extra `plot`), imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.arguments import reject
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_panels, room_between, save

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

Curve = Sequence[tuple[float, float]]  # step, value
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # setting -> system -> one curve per seed


def draw_curve_panels(panels: Panels, file: str | Path, metric: str, title: str | None = None) -> Path:
    """Draw `metric` against steps to the PNG `file`, all panels on one scale.

    Seconds are not shown, since runs that train side by side share their machine.

    Args:
        panels: curves by setting and system; those without curves are left out.
        file: replaced in one go; folders are made.
        metric: names the y axis.
        title: over the whole picture.
    """
    panels = {setting: panel for setting, panel in panels.items() if any(panel.values())}
    if not panels:
        reject("panels", "at least one curve", "none")
    systems = list(dict.fromkeys(system for panel in panels.values() for system, curves in panel.items() if curves))
    figure, axes, left = new_panels(len(panels), bool(title))
    for axis, (setting, panel) in zip(axes, panels.items(), strict=True):
        for system, curves in panel.items():
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), **_look(systems.index(system)))
        clean(axis, "step")
        axis.set_title(setting, fontsize=10, color=STYLE["ink"])
    limits = [axis.get_ylim() for axis in axes]
    low, high = room_between(min(low for low, _ in limits), max(high for _, high in limits))
    for axis in axes:
        axis.set_ylim(low, high)
    for axis in left:
        axis.set_ylabel(metric, color=STYLE["ink"])
    legend_below(figure, _handles(systems))
    return save(figure, file, title)


def _look(index: int) -> dict[str, Any]:
    return {"color": PALETTE[index % len(PALETTE)], "marker": "o", "ms": 3, "lw": 1.5, "alpha": 0.8}


def _handles(systems: Sequence[str]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=system, **_look(index)) for index, system in enumerate(systems)]
