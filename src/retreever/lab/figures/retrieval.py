"""Figures of the search of one query, as in the paper's appendix, and of training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.arguments import reject
from retreever.explanation import Explanation
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_figure, save
from retreever.lab.figures.tree import COLOURS, READ, STAR, TAKEN, draw_tree, layout_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Histories = Mapping[str, Sequence[Mapping[str, float]]]  # name of a run -> its records

_MEANING = ("may still be explored", "explored, not read", "never explored", "read")  # of COLOURS, in turn
_LETTERS = 12  # of a caption, per inch


def draw_retrieval(
    explanation: Explanation, file: str | Path, truth: int | None = None, title: str | None = None
) -> Path:
    """Draw the search to the PNG `file`: one panel for the start of each step, and one for the end.

    With a budget, the steps of one level share a panel. The last panel has the numbers of all tokens, which are those
    of the text of `explain`, under a bar for each node read. `truth` is the number of the token that holds the answer,
    marked by a star.
    """
    if truth is not None and truth not in explanation.numbers:
        reject("truth", f"the number of one of the {explanation.tokens} tokens", truth)
    layout = layout_of(explanation)
    ends = (*explanation.starts, len(explanation.steps), len(explanation.steps))
    panels = len(ends) - 1
    columns = min(panels, max(1, round(15 / layout.width)))
    rows = -(-panels // columns)
    columns = -(-panels // rows)  # fill the last row as far as it goes
    figure = new_figure(columns * layout.width, rows * layout.height + 0.5 + 0.4 * bool(title))
    grid: Any = figure.subplots(rows, columns, squeeze=False).flat
    for panel, axis in enumerate(grid):
        axis.axis("off")
        if panel < panels:
            draw_tree(axis, explanation, layout, ends[panel], ends[panel + 1], truth)
            named, counted = (_caption(explanation, panel, named) for named in (True, False))
            caption = named if len(named) <= _LETTERS * layout.width else counted
            axis.set_title(caption, fontsize=10, color=STYLE["ink"], pad=3)
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


def _caption(explanation: Explanation, panel: int, named: bool) -> str:
    """What happened since the panel before; nodes are named, or counted."""

    def told(nodes: Sequence[int]) -> str:
        return ", ".join(map(str, nodes)) if named else f"{len(nodes)} node{'s' * (len(nodes) != 1)}"

    steps, ends = explanation.steps, (*explanation.starts, len(explanation.steps))
    name = "Step" if len(steps) == len(ends) - 1 else "Level"  # with a budget a level has several steps
    if panel == 0:
        return f"{name} 0: start at the root"
    if panel == len(ends) - 1:
        leaves, nodes = explanation.leaves, f"{len(explanation.selected)} nodes"
        start = f"{'leaf' if len(leaves) == 1 else 'leaves'} {told(leaves)} read, {nodes}" if named else f"{nodes} read"
        return f"End: {start} for {explanation.tokens} tokens"
    done = steps[ends[panel - 1] : ends[panel]]
    taken, rejected = [n for step in done for n in step.taken], [n for step in done for n in step.rejected]
    rest = f", {told(rejected)} rejected" if rejected else "" if len(taken) > 1 else ", the only child"
    return f"{name} {panel}: {told(taken)} taken{rest}"


def _tree_legend(figure: Figure, free: Axes | None, explanation: Explanation, truth: int | None) -> None:
    """Draw the legend in the free cell of the grid if there is one, otherwise below."""
    from matplotlib.lines import Line2D

    def entry(label: str, **look: Any) -> Line2D:
        plain: dict[str, Any] = {"ls": "none", "ms": 9, "mec": STYLE["ink"], "mew": 0.6}
        return Line2D([], [], label=label, **plain | look)

    colours = zip(_MEANING, COLOURS.values(), strict=True)
    handles = [entry(meaning, marker="o", mfc=colour) for meaning, colour in colours]
    handles.append(entry("being explored", marker="D", ms=8, mfc=COLOURS["explored"], mew=1.6))
    handles.append(entry("taken: explored next", ls="-", color=TAKEN, lw=1.8))
    handles.append(entry("rejected or leaf: read", ls="-", color=READ, lw=1.4))
    handles.append(entry("tokens under a node read", ls="-", color=COLOURS["selected"], lw=3))
    if truth is not None:
        handles.append(entry("holds the answer", marker="*", ms=12, mfc=STAR, mec="white"))
    if not all(explanation.real):
        handles.append(entry("padding", marker="o", ms=5, mfc="white", mec=STYLE["faint"], mew=1))
    if free is not None:
        look: dict[str, Any] = {"frameon": False, "labelcolor": STYLE["ink"], "labelspacing": 0.7}
        free.legend(handles=handles, loc="center", fontsize=10.5, **look)
        return
    legend_below(figure, handles)
