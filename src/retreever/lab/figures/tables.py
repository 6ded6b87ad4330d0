"""Figures of a table: scores against tokens read, the paper's value beside ours, and learning curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.arguments import reject
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_panels, room_between, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]  # step, value
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # setting -> system -> one curve per seed
Row = Mapping[str, Any]  # system, setting, tokens, paper, paper_std, mean, std
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
KEYS = {False: ("paper", "paper_std"), True: ("mean", "std")}  # whether ours -> keys of a row
Place = tuple[str, float, bool]  # system, tokens, whether ours


def panels_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by setting and, within it, by system, those with fewer tokens first; rows without any value are left out."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.get("paper") is not None or row.get("mean") is not None:
            panels.setdefault(row["setting"], {}).setdefault(row["system"], []).append(row)
    for systems in panels.values():
        for points in systems.values():
            points.sort(key=lambda row: float(row["tokens"]))
    return panels


def draw_scores_against_tokens(
    rows: Sequence[Row],
    file: str | Path,
    score: str = "log-likelihood",
    title: str | None = None,
    cost: str = "tokens read per query",
) -> Path:
    """Draw one panel per setting, one marker per system, to the PNG `file`: ours filled, the paper's hollow.

    "mean" and "std" (ours), "paper" and "paper_std" of a row may be None or absent. `cost` says what "tokens" are,
    where they are another cost of a prediction.
    """
    panels = panels_of(rows)
    if not panels:
        reject("rows", "at least one with a value for mean or paper", "none")
    systems = list(dict.fromkeys(row["system"] for row in rows))
    systems = [system for system in systems if any(system in panel for panel in panels.values())]
    figure, axes, left = new_panels(len(panels), bool(title))
    for axis, (setting, panel) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, panel, systems)
        _finish_panel(axis, setting, [row["tokens"] for points in panel.values() for row in points], cost)
    for axis in left:
        axis.set_ylabel(score, color=STYLE["ink"])
    _legend(figure, systems, rows)
    return save(figure, file, title)


def places_of(panel: Mapping[str, Sequence[Row]]) -> dict[Place, float]:
    """Positions of markers on the x axis: at their tokens, or side by side where several have the same tokens."""
    beside: dict[float, list[Place]] = {}
    for system, rows in panel.items():
        for row in rows:
            given = [ours for ours, (mean, _) in KEYS.items() if row.get(mean) is not None]
            beside.setdefault(row["tokens"], []).extend((system, row["tokens"], ours) for ours in given)
    low, high = axis_limits(list(beside))

    def step(count: int) -> float:
        """About one marker's width, less where many would take more than a tenth of the axis."""
        return (high / low) ** min(0.022, 0.1 / count)

    return {
        place: tokens * step(len(places)) ** (index - (len(places) - 1) / 2)
        for tokens, places in beside.items()
        for index, place in enumerate(places)
    }


def _draw_panel(axis: Axes, panel: Mapping[str, Sequence[Row]], systems: Sequence[str]) -> None:
    places = places_of(panel)
    for system, rows in panel.items():
        for ours, (mean, std) in KEYS.items():
            points = [row for row in rows if row.get(mean) is not None]
            if points:
                x = [places[system, row["tokens"], ours] for row in points]
                y, spread = [row[mean] for row in points], [row.get(std) or 0.0 for row in points]
                axis.errorbar(x, y, spread, **_look(systems.index(system), ours))


def _look(index: int, ours: bool) -> dict[str, Any]:
    """Style of a system: filled and joined by a line for ours, hollow and dotted for the paper's."""
    colour = PALETTE[index % len(PALETTE)]
    marker = MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]  # no two systems have both in common
    look: dict[str, Any] = {"color": colour, "marker": marker, "ms": 6.5, "mew": 1.3}
    look |= {"mec": colour, "elinewidth": 1.2, "capsize": 2.5, "zorder": 4 if ours else 3}
    return look | ({"mfc": colour, "lw": 1.3} if ours else {"mfc": "white", "lw": 0.9, "ls": ":"})


def axis_limits(tokens: Sequence[float]) -> tuple[float, float]:
    """Limits of the x axis: some room on both sides, and at least a factor of four in all."""
    low, high = min(tokens), max(tokens)
    room = max((high / low) ** 0.1, (4 / (high / low)) ** 0.5, 1.15)
    return low / room, high * room


def ticks_of(tokens: Sequence[float]) -> list[float]:
    """The token counts that occur, the most frequent first, without those too close to another one."""
    low, high = axis_limits(tokens)
    ticks: list[float] = []
    for value, _ in Counter(sorted(tokens)).most_common():
        if all(max(value / tick, tick / value) >= (high / low) ** 0.09 for tick in ticks):
            ticks.append(value)
    return sorted(ticks)


def round_values(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten within the limits of the axis."""
    low, high = axis_limits(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


def _finish_panel(axis: Axes, setting: str, counts: Sequence[float], cost: str) -> None:
    clean(axis, cost)
    axis.set_xscale("log")
    axis.set_xlim(*axis_limits(counts))
    ticks = ticks_of(counts if all(float(count).is_integer() for count in counts) else round_values(counts))
    axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.margins(y=0.12)
    axis.set_ylim(*room_between(*axis.get_ylim()))
    axis.set_title(setting, fontsize=10, color=STYLE["ink"])


def _legend(figure: Figure, systems: Sequence[str], rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    def entry(label: str, index: int, ours: bool, **change: Any) -> Line2D:
        look = _look(index, ours) | change
        return Line2D([], [], label=label, **{k: v for k, v in look.items() if k not in ("elinewidth", "capsize")})

    grey: dict[str, Any] = {"color": STYLE["ink"], "mec": STYLE["ink"]}
    handles = [entry(system, index, True) for index, system in enumerate(systems)]
    if any(row.get("mean") is not None for row in rows):
        handles.append(entry("ours, mean ± std", 0, True, **grey | {"mfc": STYLE["ink"]}))
    if any(row.get("paper") is not None for row in rows):
        handles.append(entry("the paper's", 0, False, **grey))
    legend_below(figure, handles)


def draw_curve_panels(panels: Panels, file: str | Path, metric: str, title: str | None = None) -> Path:
    """Draw `metric` against steps to the PNG `file`, all panels on one scale; those without curves are left out.

    Seconds are not shown, since runs that train side by side share their machine.
    """
    panels = {setting: panel for setting, panel in panels.items() if any(panel.values())}
    if not panels:
        reject("panels", "at least one curve", "none")
    systems = list(dict.fromkeys(system for panel in panels.values() for system, curves in panel.items() if curves))
    look: dict[str, Any] = {"marker": "o", "ms": 3, "lw": 1.5, "alpha": 0.8}
    colours = {system: PALETTE[index % len(PALETTE)] for index, system in enumerate(systems)}
    figure, axes, left = new_panels(len(panels), bool(title))
    for axis, (setting, panel) in zip(axes, panels.items(), strict=True):
        for system, curves in panel.items():
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colours[system], **look)
        clean(axis, "step")
        axis.set_title(setting, fontsize=10, color=STYLE["ink"])
    limits = [axis.get_ylim() for axis in axes]
    low, high = room_between(min(low for low, _ in limits), max(high for _, high in limits))
    for axis in axes:
        axis.set_ylim(low, high)
    for axis in left:
        axis.set_ylabel(metric, color=STYLE["ink"])
    from matplotlib.lines import Line2D

    legend_below(figure, [Line2D([], [], label=system, color=colours[system], **look) for system in systems])
    return save(figure, file, title)
