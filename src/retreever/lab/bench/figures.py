"""Figures of benchmarks: lines over the number of tokens on logarithmic axes, and bars. A method keeps its colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Unit = Literal["seconds", "bytes"]
Points = Sequence[tuple[int, float]]

# Names of methods in JSON; every figure shows a method in the same style.
TREE, FULL, PERCEIVER, REFERENCE = "tree", "all tokens", "perceiver", "plain torch"
BUDGET = "tree, 4x tokens"
CACHED, RAW = "all tokens, cached", "all tokens, raw"
BUILD, PRODUCTS, BUILD_GRAPH, PRODUCTS_GRAPH = "build", "products", "build, graph", "products, graph"
APPENDS = {
    ("transformer", "eager"): "append",
    ("transformer", "graph"): "append, graph",
    ("mean", "eager"): "append, means",
    ("mean", "graph"): "append, means, graph",
}
REBUILDS = {"transformer": "rebuild", "mean": "rebuild, means"}
FOLDS = {"transformer": "fold", "mean": "fold, means"}
ENCODE = "encode again"
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _SKY, _GREY = PALETTE


class _Look(NamedTuple):
    label: str
    colour: str
    dash: str
    marker: str
    width: float


_LOOKS = {
    TREE: _Look("Tree Cross Attention", _BLUE, "-", "o", 2.4),
    BUDGET: _Look("Tree Cross Attention, budget of 4 times one path", _SKY, "-", "P", 1.8),
    FULL: _Look("cross attention over all tokens, keys and values cached", _RED, "-", "s", 2.0),
    CACHED: _Look(
        "cross attention over all tokens, keys and values cached", _RED, "-", "", 4.8
    ),  # shows under the tree's
    RAW: _Look("cross attention over all tokens, projected in every call", _ORANGE, "-", "^", 2.0),
    PERCEIVER: _Look("Perceiver IO read-out, as many latents as the tree reads tokens", _GREEN, "--", "D", 1.5),
    REFERENCE: _Look("tree search in plain torch", _GREY, ":", "v", 1.5),
    BUILD: _Look("tree built, eager", _BLUE, "-", "o", 2.4),
    PRODUCTS: _Look("its bare matrix products, eager", _GREY, "--", "s", 1.6),
    BUILD_GRAPH: _Look("tree built, CUDA graph", _SKY, "-", "o", 2.4),
    PRODUCTS_GRAPH: _Look("its bare matrix products, CUDA graph", _PINK, "--", "s", 1.6),
}
_LOOKS |= {
    APPENDS["transformer", "eager"]: _Look("one token appended", _BLUE, "-", "o", 2.4),
    APPENDS["transformer", "graph"]: _Look("one token appended, CUDA graph", _SKY, "-", "o", 2.0),
    APPENDS["mean", "eager"]: _Look("one token appended, means", _GREEN, "-", "D", 2.0),
    APPENDS["mean", "graph"]: _Look("one token appended, means, CUDA graph", _GREEN, ":", "D", 1.6),
    REBUILDS["transformer"]: _Look("tree built anew", _RED, "-", "s", 2.0),
    REBUILDS["mean"]: _Look("tree of means built anew", _ORANGE, "-", "^", 2.0),
    ENCODE: _Look("one layer of self-attention over all tokens", _GREY, "--", "v", 1.6),
}
_UNITS: dict[Unit, tuple[tuple[float, str], ...]] = {
    "seconds": ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    "bytes": ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB")),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines by name, and two names whose ratio at the last common point is annotated."""

    title: str
    lines: Mapping[str, Points]
    compare: tuple[str, str] | None = None


def draw_panels(
    grid: Sequence[Sequence[Panel]], file: Path, title: str, unit: Unit, labels: Sequence[str] = ("",)
) -> Path:
    """Draw panels in rows, all with the same axes; `labels` name the rows."""
    panels = [panel for row in grid for panel in row]
    names = [name for name in _LOOKS if any(name in panel.lines for panel in panels)]
    width = max(7.0, 3.5 * len(grid[0]))
    longest = max(len(_LOOKS[name].label) for name in names)
    columns = 2 if 1 + 0.15 * longest < width else 1  # of the legend; characters are about 0.075 inches wide
    height = (3.6 if len(grid) == 1 else 3.0) * len(grid) + 0.6 + 0.25 * -(-len(names) // columns)
    figure = new_figure(width, height)
    axes: Any = figure.subplots(len(grid), len(grid[0]), sharex=True, sharey=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        _draw_panel(axis, panel, unit)
    for axis, panel in zip(axes.flat, panels, strict=True):  # after all lines, which set the range of the axes
        _draw_factor(axis, panel)
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label, color=STYLE["ink"])
    for axis in axes[-1]:
        axis.set_xlabel("context tokens", color=STYLE["ink"])
    sizes = sorted({n for panel in panels for line in panel.lines.values() for n, _ in line})
    shown = sizes[:: -(-len(sizes) // 7)]
    axes[0][0].set_xticks(shown, [short(n) for n in shown])
    drawn = {str(line.get_label()): line for axis in axes.flat for line in axis.get_lines()}
    legend_below(figure, [drawn[_LOOKS[name].label] for name in names], columns, size=9.5)
    return save(figure, file, title)


def draw_bars(groups: Mapping[str, Mapping[str, tuple[float, str]]], file: Path, title: str, label: str) -> Path:
    """Draw horizontal bars with their values, each in the colour of a method, one panel per group."""
    figure = new_figure(8.5, 0.7 + sum(0.75 + 0.32 * len(bars) for bars in groups.values()))
    heights = [len(bars) + 1 for bars in groups.values()]
    axes: Any = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=True):
        places, values = range(len(bars)), [value for value, _ in bars.values()]
        axis.barh(places, values, height=0.68, color=[_LOOKS[method].colour for _, method in bars.values()])
        clean(axis, label if axis is axes[-1, 0] else "")
        axis.set_yticks(places, bars.keys())
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlim(0, 1.12 * max(values))
        axis.set_title(group, fontsize=10.5, color=STYLE["ink"], loc="left")
        look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": STYLE["ink"]}
        for place, value in zip(places, values, strict=True):
            axis.annotate(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", (value, place), (4, 0), **look)
    return save(figure, file, title)


def lines_of(rows: Iterable[Mapping[str, Any]], key: str, scale: float) -> dict[str, list[tuple[int, float]]]:
    """The lines of a panel: method -> context tokens and `key` times `scale` of every row that has it."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if key in row:
            lines.setdefault(row["method"], []).append((row["n"], scale * row[key]))
    return lines


def readable(value: float, unit: Unit) -> str:
    """A value with its best unit: 0.0012 seconds is "1.2 ms"."""
    scale, name = next((entry for entry in reversed(_UNITS[unit]) if value >= 0.9995 * entry[0]), _UNITS[unit][0])
    shown = value / scale
    return f"{shown:,.0f} {name}" if shown >= 1000 else f"{shown:.3g} {name}"


def short(n: float) -> str:
    """A number in powers of 1,024: 256, 4k, 1M."""
    for scale, letter in ((2**20, "M"), (2**10, "k")):
        if n >= scale:
            return f"{n / scale:.3g}{letter}"
    return f"{n:.3g}"


def _draw_panel(axis: Axes, panel: Panel, unit: Unit) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=16 if unit == "bytes" else 10)
    for name, points in panel.lines.items():
        look = _LOOKS[name]
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "ms": 4.5, "mec": "white", "mew": 0.6}
        style |= {"lw": look.width, "label": look.label, "zorder": 4 if name == TREE else 3}
        axis.plot([n for n, _ in points], [value for _, value in points], look.dash, **style)
    clean(axis, "")
    axis.margins(x=0.06, y=0.08)
    axis.set_title(panel.title, fontsize=10.5, color=STYLE["ink"])
    axis.yaxis.set_major_formatter(lambda value, _: readable(value, unit))
    axis.minorticks_off()


def _draw_factor(axis: Axes, panel: Panel) -> None:
    """Draw an arrow between the two lines compared, at their last common point, with their ratio."""
    from matplotlib.patheffects import withStroke

    upper, lower = (dict(panel.lines.get(name, ())) for name in panel.compare or ("", ""))
    common = upper.keys() & lower.keys()
    if not common:
        return
    n = max(common)
    high, low = upper[n], lower[n]
    bottom, top = axis.get_ylim()
    room = math.log(high / low) / math.log(top / bottom)  # share of the panel's height
    if room < 0.03:
        return
    arrow = {"arrowstyle": "<->", "color": STYLE["ink"], "lw": 0.9, "shrinkA": 4, "shrinkB": 4}
    axis.annotate("", (n, high), (n, low), arrowprops=arrow, zorder=2)
    text = f"{high / low:,.0f}×" if high / low >= 10 else f"{high / low:.1f}×"  # noqa: RUF001
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10.5, "weight": "bold", "color": STYLE["ink"]}
    look |= {"path_effects": [withStroke(linewidth=3, foreground="white")], "zorder": 6}
    if room < 0.2:  # no space between the lines: write above
        axis.annotate(text, (n, high), (0, 6), ha="center", va="bottom", **look)
    else:
        axis.annotate(text, (n, (high * low) ** 0.5), (-5, 0), ha="right", va="center", **look)
