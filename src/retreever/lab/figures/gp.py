"""Figures of GP regression: predictions against the exact posterior, and the nodes one query read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.arguments import check_int
from retreever.batch import Batch
from retreever.explanation import explain
from retreever.lab.figures.predictions import evaluating, mean_and_std, predict
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_figure, save
from retreever.models.retreever import ReTreever
from retreever.tasks.gp import GPTask, Hyperparameters
from retreever.tasks.seeds import stream
from retreever.train.protocols import Model
from retreever.tree.nodes import level_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 241  # places on [-2, 2] the curves are drawn through
_MODEL, _EXACT, _QUERY = PALETTE[0], PALETTE[1], PALETTE[3]
_NODE = "#a9cde5"  # a paler _MODEL


class NodeRead(NamedTuple):
    """A node one query attended to: its level (1 below the root), and the context points it covers.

    `points` are indices into the context as it was given.
    """

    node: int
    level: int
    points: tuple[int, ...]


class Function(NamedTuple):
    """A function drawn from the process, and its hyperparameters."""

    batch: Batch
    hyper: Hyperparameters

    @property
    def query(self) -> int:
        """The target whose reading is shown: the middle one."""
        return self.batch.xt.shape[1] // 2


def nodes_read(model: ReTreever, batch: Batch, row: int = 0, query: int = 0) -> tuple[NodeRead, ...]:
    """Nodes that target `query` of row `row` attended to; every real context point is under exactly one of them."""
    with evaluating(model) as device:
        moved = batch.to(device)
        found = model.search(model.encode(moved.xc, moved.yc, moved.context_mask), moved.xt)
    explanation = explain(found, row, query)
    return tuple(
        NodeRead(read.node, level_of(explanation.plan, read.node), read.numbers) for read in explanation.selected
    )


def validation_functions(task: GPTask, seed: int, count: int) -> list[Function]:
    """Functions of a stream never used for training or testing, those with the fewest context points first."""
    generator = stream(f"figure-{task.kernel}-{task.ranges}", "validation", seed)
    drawn = [Function(*task.draw(1, generator)) for _ in range(count)]
    return sorted(drawn, key=lambda function: function.batch.xc.shape[1])


def on_grid(batch: Batch, places: Float[Tensor, " g"]) -> Batch:
    """The same context, with targets at `places`; their values are unknown and set to 0."""
    xt = places[None, :, None].to(batch.xc).expand(len(batch.xc), -1, 1)
    return Batch(batch.xc, batch.yc, xt, torch.zeros_like(xt), batch.context_mask)


def draw_gp(model: Model, task: GPTask, file: str | Path, seed: int = 0, functions: int = 4) -> Path:
    """Draw predictions (mean and two standard deviations) against the exact posterior, to the PNG `file`.

    For models that search a tree, the nodes that one query read are drawn below each panel: a line per node, from the
    first to the last context point under it, one row per level of the tree. `seed` draws the functions, a panel each.
    """
    check_int("seed", seed, 0)
    check_int("functions", functions, 1)
    searches = isinstance(model, ReTreever) and model.config.retrieval == "policy"
    columns = min(2, functions)
    rows = -(-functions // columns)
    figure = new_figure(5.6 * columns, (3.5 if searches else 2.7) * rows + 0.4)
    heights = [2.5, 1.0] * rows if searches else [1.0] * rows
    grid: Any = figure.subplots(len(heights), columns, squeeze=False, sharex=True, height_ratios=heights)
    for index, function in enumerate(validation_functions(task, seed, functions)):
        row, column = divmod(index, columns)
        _draw_function(grid[2 * row if searches else row, column], model, task, function, mark=searches)
        if searches:
            assert isinstance(model, ReTreever)
            _draw_reading(grid[2 * row + 1, column], function, nodes_read(model, function.batch, 0, function.query))
    tops = list(grid[::2].flat)
    for axis in grid.flat:
        axis.set_visible(axis.has_data())
        axis.tick_params(labelbottom=not (searches and axis in tops))
    _legend(figure, searches)
    return save(figure, file)


def _draw_function(axis: Axes, model: Model, task: GPTask, function: Function, mark: bool) -> None:
    """Prediction, posterior, context and targets of one function; `mark` shows where its query is."""
    places = torch.linspace(-2, 2, GRID)
    batch, grid = function.batch, on_grid(function.batch, places)
    exact_mean, exact_std = (part[0, :, 0] for part in mean_and_std(task.posterior(grid, function.hyper)))
    mean, std = (part[0, :, 0] for part in mean_and_std(predict(model, grid)))
    axis.fill_between(places, mean - 2 * std, mean + 2 * std, color=_MODEL, alpha=0.18, lw=0)
    axis.plot(places, mean, color=_MODEL, lw=1.8)
    axis.plot(places, exact_mean, color=_EXACT, lw=1.4, ls="--")
    for sign in (-2, 2):
        axis.plot(places, exact_mean + sign * exact_std, color=_EXACT, lw=0.8, ls=":")
    axis.plot(batch.xt.flatten(), batch.yt.flatten(), "o", ms=4, mfc="white", mec=STYLE["ink"], mew=0.8)
    axis.plot(batch.xc.flatten(), batch.yc.flatten(), "o", ms=4.5, mfc=STYLE["ink"], mec="white", mew=0.6)
    if mark:
        axis.axvline(float(batch.xt[0, function.query, 0]), color=_QUERY, lw=1.2, zorder=1)
    clean(axis, "" if mark else "x")
    period = f", period {float(function.hyper.period):.2f}" if task.kernel == "periodic" else ""
    drawn_with = f"length-scale {float(function.hyper.length):.2f}{period}"
    axis.set_title(f"{batch.xc.shape[1]} context points, {drawn_with}", fontsize=10, color=STYLE["ink"])
    axis.set_ylabel("y", color=STYLE["ink"])


def _draw_reading(axis: Axes, function: Function, read: tuple[NodeRead, ...]) -> None:
    x = function.batch.xc[0, :, 0]
    for node in read:
        at = x[list(node.points)]
        ends = [float(at.min()), float(at.max())]
        axis.plot(ends, [-node.level] * 2, "o-", color=_NODE, lw=6, ms=6, mew=0, zorder=2)
        axis.plot(at, [-node.level] * len(at), "o", ms=3.2, mfc=_MODEL, mec="white", mew=0.4, zorder=3)
    where = float(function.batch.xt[0, function.query, 0])
    axis.axvline(where, color=_QUERY, lw=1.2, zorder=1)
    clean(axis, "x")
    levels = sorted({node.level for node in read})
    axis.set_yticks([-level for level in levels], [str(level) for level in levels], fontsize=8)
    axis.set_ylim(-max(levels) - 0.7, -0.3)
    axis.set_ylabel("tree level", fontsize=9, color=STYLE["ink"])
    title = f"the query at x = {where:.2f} read {len(read)} nodes for {len(x)} points"
    axis.set_title(title, fontsize=9, color=STYLE["ink"], pad=3)


def _legend(figure: Figure, searches: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    point: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5}
    handles: list[Any] = [
        Line2D([], [], color=_MODEL, lw=1.8, label="model: mean"),
        Patch(color=_MODEL, alpha=0.18, lw=0, label="model: ± 2 std"),
        Line2D([], [], color=_EXACT, lw=1.4, ls="--", label="exact posterior: mean"),
        Line2D([], [], color=_EXACT, lw=0.8, ls=":", label="exact posterior: ± 2 std"),
        Line2D([], [], mfc=STYLE["ink"], mec="white", label="context", **point),
        Line2D([], [], mfc="white", mec=STYLE["ink"], label="held-out values", **point),
    ]
    if searches:
        handles.append(Line2D([], [], color=_QUERY, lw=1.2, label="query shown below"))
        handles.append(Line2D([], [], color=_NODE, lw=6, label="node read, with the points under it"))
    legend_below(figure, handles, columns=4 if figure.get_figwidth() > 8 else 2)
