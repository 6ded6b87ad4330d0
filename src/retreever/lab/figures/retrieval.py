"""Figures of the search of one query, as in the paper's appendix, and of training curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.arguments import reject
from retreever.explanation import Explanation, State, Step, children_of, level_of
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Histories = Mapping[str, Sequence[Mapping[str, float]]]  # name of a run -> its records

_COLOURS: dict[State, str] = {"open": "#f6d55c", "explored": "#a9aeb4", "unexplored": "#d1495b", "selected": "#12a074"}
_MEANING = ("may still be explored", "explored, not selected", "never explored", "selected")  # of _COLOURS, in turn
_GREEN, _RED, _STAR = "#0b7a57", "#c0313f", "#1f4e9c"
_LABEL_ALL = 31  # nodes up to which every one is labelled


@dataclass(frozen=True)
class _Layout:
    """Where nodes lie (x in leaf slots, y in levels), their diameters in points, and the panel's size in inches."""

    x: tuple[float, ...]
    level: tuple[int, ...]
    diameter: tuple[float, ...]
    width: float
    height: float


def draw_retrieval(
    explanation: Explanation, file: str | Path, truth: int | None = None, title: str | None = None
) -> Path:
    """Draw the search to the PNG `file`: one panel for the start of each step, and one for the end.

    `truth` is the leaf slot of the token that holds the answer, marked by a star.
    """
    leaves = explanation.plan.leaves
    if truth is not None and not 0 <= truth < leaves:
        reject("truth", f"a leaf slot from 0 to {leaves - 1}", truth)
    layout = _layout(explanation)
    panels = len(explanation.steps) + 1
    columns = min(panels, max(1, round(15 / layout.width)))
    rows = -(-panels // columns)
    columns = -(-panels // rows)  # fill the last row as far as it goes
    figure = new_figure(columns * layout.width, rows * layout.height + 0.5 + 0.4 * bool(title))
    grid: Any = figure.subplots(rows, columns, squeeze=False).flat
    for step, axis in enumerate(grid):
        axis.axis("off")
        if step < panels:
            _draw_panel(axis, explanation, layout, step, truth)
    _tree_legend(figure, grid[panels] if panels < rows * columns else None, explanation, truth)
    return save(figure, file, title)


def draw_curves(histories: Histories, file: str | Path, metric: str = "accuracy", title: str | None = None) -> Path:
    """Draw `metric` against steps and against seconds, one line per run, to the PNG `file`.

    Every record has "step" and "seconds", some of them `metric`.
    """
    lines = {name: [record for record in records if metric in record] for name, records in histories.items()}
    empty = [name for name, records in lines.items() if not records]
    if empty or not lines:
        reject("histories", f"records with {metric!r} for every run", f"none for {', '.join(empty) or 'any run'}")
    figure = new_figure(10, 4 + 0.3 * bool(title))
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, key in ((left, "step"), (right, "seconds")):
        for index, (name, records) in enumerate(lines.items()):
            mark = "o" if len(records) <= 25 else ""
            across, up = [r[key] for r in records], [r[metric] for r in records]
            axis.plot(across, up, marker=mark, ms=3.5, color=PALETTE[index % len(PALETTE)], lw=1.8, label=name)
        clean(axis, key)
    left.set_ylabel(metric, color=STYLE["ink"])
    legend_below(figure, left.get_lines(), columns=min(4, len(lines)), size=10)
    return save(figure, file, title)


def _layout(explanation: Explanation) -> _Layout:
    plan = explanation.plan
    level = tuple(level_of(plan, node) for node in range(plan.nodes + 1))
    gap = 0.35  # between leaf blocks, in slots
    x = [0.0] * len(level)
    for node in range(plan.nodes, -1, -1):
        children = children_of(plan, node)
        slot = node - 1 - plan.leaf_offset
        x[node] = sum(x[c] for c in children) / len(children) if children else slot + gap * (slot // plan.block)
    span = x[-1] + 1
    width = min(7.5, max(3.7, 0.125 * span))
    apart = [72 * 0.95 * width / span * _spacing(x, level, depth) for depth in range(plan.depth + 2)]
    diameter = tuple(min(21.0, max(1.5, 0.8 * apart[depth])) for depth in level)
    return _Layout(tuple(x), level, diameter, width, 0.55 * (plan.depth + 1) + 1.15)


def _spacing(x: Sequence[float], level: Sequence[int], depth: int) -> float:
    """Smallest distance between neighbours of one level."""
    places = [place for place, own in zip(x, level, strict=True) if own == depth]
    return min((b - a for a, b in pairwise(places)), default=math.inf)


def _draw_panel(axis: Axes, explanation: Explanation, layout: _Layout, step: int, truth: int | None) -> None:
    states = explanation.states(step)
    current = explanation.steps[step].node if step < len(explanation.steps) else None
    _draw_edges(axis, explanation, layout)
    for done in explanation.steps[:step]:
        _draw_arrows(axis, layout, done)
    for node, state in enumerate(states):
        _draw_node(axis, layout, node, state if explanation.real[node] else None, node == current)
    below = 0.3 if truth is None else 0.65  # room under the leaves, in levels
    if truth is not None:
        x = layout.x[explanation.plan.leaf_offset + 1 + truth]
        axis.plot(x, -layout.level[-1] - 0.45, "*", color=_STAR, ms=12, mec="white", mew=0.8, zorder=5)
    for node, state in enumerate(states):
        if explanation.real[node] and (len(states) <= _LABEL_ALL or state in ("explored", "selected")):
            _draw_label(axis, layout, node, state, below)
    axis.set_xlim(-0.8, layout.x[-1] + 0.8)
    axis.set_ylim(-layout.level[-1] - below - (0.45 if _label_size(layout, len(layout.x) - 1) is None else 0.1), 0.4)
    axis.set_title(_caption(explanation, step), fontsize=10, color=STYLE["ink"], pad=3)


def _draw_edges(axis: Axes, explanation: Explanation, layout: _Layout) -> None:
    from matplotlib.collections import LineCollection

    place = [(x, -level) for x, level in zip(layout.x, layout.level, strict=True)]
    pairs = [(node, child) for node in range(len(place)) for child in children_of(explanation.plan, node)]
    for real, width in ((True, 0.9), (False, 0.4)):
        lines = [(place[a], place[b]) for a, b in pairs if explanation.real[b] is real]
        axis.add_collection(LineCollection(lines, colors=STYLE["faint"], linewidths=width, zorder=1))


def _draw_arrows(axis: Axes, layout: _Layout, step: Step) -> None:
    for child in step.children:
        taken = child not in step.rejected
        style = {
            "arrowstyle": "-|>,head_width=0.22,head_length=0.4",
            "mutation_scale": min(10.0, max(5.0, 1.2 * layout.diameter[child])),
            "color": _GREEN if taken else _RED,
            "lw": 1.8 if taken else 1.2,
            "shrinkA": layout.diameter[step.node] / 2,
            "shrinkB": layout.diameter[child] / 2,
        }
        head, tail = ((layout.x[node], -layout.level[node]) for node in (child, step.node))
        axis.annotate("", head, tail, arrowprops=style, zorder=2)


def _draw_node(axis: Axes, layout: _Layout, node: int, state: State | None, current: bool) -> None:
    """Draw a circle, or a diamond for the node being explored; `state` None is padding."""
    size = layout.diameter[node]
    if len(layout.x) > _LABEL_ALL and state in ("open", "unexplored") and size > 8:
        size = max(8.0, 0.7 * size)  # smaller, since not labelled
    look: dict[str, Any] = {"marker": "o", "ms": size, "mec": "white", "mew": min(0.8, size / 12), "zorder": 3}
    look |= {"ms": 0.5 * size, "mfc": "white", "mec": STYLE["faint"]} if state is None else {"mfc": _COLOURS[state]}
    if state in ("selected", "explored"):
        look |= {"mec": STYLE["ink"], "zorder": 4}
    if current:
        look |= {"marker": "D", "ms": 0.82 * size, "mew": 1.6}
    axis.plot(layout.x[node], -layout.level[node], linestyle="none", **look)


def _draw_label(axis: Axes, layout: _Layout, node: int, state: State, below: float) -> None:
    """Draw the number of a node where there is room: inside it, or rotated below a leaf."""
    x, y, size = layout.x[node], -layout.level[node], _label_size(layout, node)
    text: dict[str, Any] = {"color": STYLE["ink"], "ha": "center", "va": "center_baseline", "zorder": 6}
    if size is not None:
        white = {"color": "white"} if state in ("unexplored", "selected") else {}
        axis.text(x, y, str(node), fontsize=size, **text | white)
    elif layout.level[node] == layout.level[-1] and layout.diameter[node] >= 5:
        axis.text(x, y - below, str(node), fontsize=7, rotation=90, **text | {"va": "top"})


def _label_size(layout: _Layout, node: int) -> float | None:
    """Font size at which a node's number fits into it; None where none is readable."""
    size = min(7.5, 0.75 * layout.diameter[node] / (0.64 * len(str(node))))
    return size if size >= 5.5 else None


def _caption(explanation: Explanation, step: int) -> str:
    steps = explanation.steps
    if step == 0:
        return "Step 0: start at the root"
    if step == len(steps):
        return f"End: {len(explanation.selected)} nodes read for {explanation.tokens} tokens"
    done = steps[step - 1]
    rejected = f", {', '.join(map(str, done.rejected))} rejected" if done.rejected else ", the only child"
    return f"Step {step}: {done.chosen} taken{rejected}"


def _tree_legend(figure: Figure, free: Axes | None, explanation: Explanation, truth: int | None) -> None:
    """Draw the legend in the free cell of the grid if there is one, otherwise below."""
    from matplotlib.lines import Line2D

    def entry(label: str, **look: Any) -> Line2D:
        plain: dict[str, Any] = {"ls": "none", "ms": 9, "mec": STYLE["ink"], "mew": 0.6}
        return Line2D([], [], label=label, **plain | look)

    colours = zip(_MEANING, _COLOURS.values(), strict=True)
    handles = [entry(meaning, marker="o", mfc=colour) for meaning, colour in colours]
    handles.append(entry("being explored", marker="D", ms=8, mfc=_COLOURS["explored"], mew=1.6))
    handles.append(entry("taken", ls="-", color=_GREEN, lw=1.8))
    handles.append(entry("rejected", ls="-", color=_RED, lw=1.4))
    if truth is not None:
        handles.append(entry("holds the answer", marker="*", ms=12, mfc=_STAR, mec="white"))
    if not all(explanation.real):
        handles.append(entry("padding", marker="o", ms=5, mfc="white", mec=STYLE["faint"], mew=1))
    if free is not None:
        look: dict[str, Any] = {"frameon": False, "labelcolor": STYLE["ink"], "labelspacing": 0.7}
        free.legend(handles=handles, loc="center", fontsize=10.5, **look)
        return
    rows = -(-len(handles) // max(3, int(figure.get_figwidth() / 1.55)))
    legend_below(figure, handles, columns=-(-len(handles) // rows))
