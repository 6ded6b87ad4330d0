"""Parts of the picture of one search: where the nodes of a tree lie, and how nodes, arrows and tokens are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from retreever.explanation import Explanation, State, Step
from retreever.lab.figures.style import STYLE
from retreever.tree.nodes import children_of, level_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[State, str] = {"open": "#f6d55c", "explored": "#a9aeb4", "unexplored": "#d1495b", "selected": "#12a074"}
TAKEN, READ, STAR = "#4a4f55", "#0b7a57", "#1f4e9c"  # arrows to nodes explored and to nodes read; the answer
LABEL_ALL = 31  # nodes up to which every one is labelled


@dataclass(frozen=True)
class Layout:
    """Where nodes lie (x in leaf slots, y in levels), their diameters in points, and the panel's size in inches.

    `token` is the number of the token on every leaf slot, None for padding.
    """

    x: tuple[float, ...]
    level: tuple[int, ...]
    diameter: tuple[float, ...]
    width: float
    height: float
    token: tuple[int | None, ...]

    @property
    def leaves(self) -> tuple[float, ...]:
        """Where the leaf slots lie."""
        return self.x[-len(self.token) :]


def layout_of(explanation: Explanation) -> Layout:
    """The layout of a tree: leaves side by side, every other node above the middle of its children."""
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
    numbers = iter(explanation.numbers)
    token = tuple(next(numbers) if real else None for real in explanation.real[plan.leaf_offset + 1 :])
    return Layout(tuple(x), level, diameter, width, 0.55 * (plan.depth + 1) + 1.3, token)


def draw_tree(
    axis: Axes, explanation: Explanation, layout: Layout, begin: int, stop: int, truth: int | None = None
) -> None:
    """Draw the tree when step `begin` begins; the nodes of the steps up to `stop` are being explored.

    If no step is left, also draw the numbers of all tokens under a bar for each node read.
    """
    states = list(explanation.states(begin))
    current = {step.node for step in explanation.steps[begin:stop]}
    _draw_edges(axis, explanation, layout)
    for done in explanation.steps[:begin]:
        _draw_arrows(axis, layout, done)
    for node, before in enumerate(states):
        state: State = "explored" if node in current else before
        _draw_node(axis, layout, node, state if explanation.real[node] else None, node in current)
        if explanation.real[node] and (len(states) <= LABEL_ALL or state in ("explored", "selected")):
            _draw_label(axis, layout, node, state)
    at_end = begin == len(explanation.steps)
    if at_end:
        _draw_bars(axis, explanation, layout)
    _draw_tokens(axis, layout, truth, at_end)
    axis.set_xlim(-0.8, layout.x[-1] + 0.8)
    axis.set_ylim(_below_leaves(layout) - (0.55 if truth is None else 0.85), 0.4)


def _spacing(x: Sequence[float], level: Sequence[int], depth: int) -> float:
    """Smallest distance between neighbours of one level."""
    places = [place for place, own in zip(x, level, strict=True) if own == depth]
    return min((b - a for a, b in pairwise(places)), default=math.inf)


def _draw_edges(axis: Axes, explanation: Explanation, layout: Layout) -> None:
    from matplotlib.collections import LineCollection

    place = [(x, -level) for x, level in zip(layout.x, layout.level, strict=True)]
    pairs = [(node, child) for node in range(len(place)) for child in children_of(explanation.plan, node)]
    for real, width in ((True, 0.9), (False, 0.4)):
        lines = [(place[a], place[b]) for a, b in pairs if explanation.real[b] is real]
        axis.add_collection(LineCollection(lines, colors=STYLE["faint"], linewidths=width, zorder=1))


def _draw_arrows(axis: Axes, layout: Layout, step: Step) -> None:
    """Draw an arrow to every child: dark to those taken, green to those read."""
    for child in step.children:
        taken = child in step.taken
        style = {
            "arrowstyle": "-|>,head_width=0.22,head_length=0.4",
            "mutation_scale": min(10.0, max(5.0, 1.2 * layout.diameter[child])),
            "color": TAKEN if taken else READ,
            "lw": 1.8 if taken else 1.4,
            "shrinkA": layout.diameter[step.node] / 2,
            "shrinkB": layout.diameter[child] / 2,
        }
        head, tail = ((layout.x[node], -layout.level[node]) for node in (child, step.node))
        axis.annotate("", head, tail, arrowprops=style, zorder=2)


def _draw_node(axis: Axes, layout: Layout, node: int, state: State | None, current: bool) -> None:
    """Draw a circle, or a diamond for the node being explored; `state` None is padding."""
    size = layout.diameter[node]
    if len(layout.x) > LABEL_ALL and state in ("open", "unexplored") and size > 8:
        size = max(8.0, 0.7 * size)  # smaller, since not labelled
    look: dict[str, Any] = {"marker": "o", "ms": size, "mec": "white", "mew": min(0.8, size / 12), "zorder": 3}
    look |= {"ms": 0.5 * size, "mfc": "white", "mec": STYLE["faint"]} if state is None else {"mfc": COLOURS[state]}
    if state in ("selected", "explored"):
        look |= {"mec": STYLE["ink"], "zorder": 4}
    if current:
        look |= {"marker": "D", "ms": 0.78 * size, "mew": min(1.6, size / 12)}
    axis.plot(layout.x[node], -layout.level[node], linestyle="none", **look)


def _draw_label(axis: Axes, layout: Layout, node: int, state: State) -> None:
    """Draw the number of a node inside it, where there is room."""
    size = _label_size(layout, node)
    if size is not None:
        colour = "white" if state in ("unexplored", "selected") else STYLE["ink"]
        place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 6}
        axis.text(layout.x[node], -layout.level[node], str(node), fontsize=size, color=colour, **place)


def _draw_bars(axis: Axes, explanation: Explanation, layout: Layout) -> None:
    """Draw a bar under the leaves of every node read."""
    for read in explanation.selected:
        slots = [slot for slot in range(*read.slots) if layout.token[slot] is not None]
        ends = [layout.leaves[slots[0]] - 0.33, layout.leaves[slots[-1]] + 0.33]
        axis.plot(ends, [_below_leaves(layout)] * 2, color=COLOURS["selected"], lw=3, solid_capstyle="butt", zorder=2)


def _draw_tokens(axis: Axes, layout: Layout, truth: int | None, every: bool) -> None:
    """Draw the number of the token `truth` under its leaf, with a star, and of `every` token where there is room."""
    tokens = [(x, token) for x, token in zip(layout.leaves, layout.token, strict=True) if token is not None]
    room, y = layout.diameter[-1], _below_leaves(layout) - (0.28 if every else 0.06)
    upright = every and 4.5 * len(str(max(token for _, token in tokens))) > 1.1 * room
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": STYLE["ink"]}
    for x, token in tokens:
        if token == truth:
            axis.plot(x, y - 0.34, "*", color=STAR, ms=12, mec="white", mew=0.8, zorder=5)
        if token == truth or (every and room >= 5):
            axis.text(x, y, f"{'' if every else 'token '}{token}", rotation=90 if upright else 0, **look)


def _below_leaves(layout: Layout) -> float:
    """Height of the bars below the leaves, in levels."""
    return -layout.level[-1] - 0.14 - layout.diameter[-1] / 80


def _label_size(layout: Layout, node: int) -> float | None:
    """Font size at which a node's number fits into it; None where none is readable."""
    size = min(7.5, 0.75 * layout.diameter[node] / (0.64 * len(str(node))))
    return size if size >= 5.5 else None
