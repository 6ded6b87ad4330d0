"""Figures of Human Activity: the observed channels of a window, and the true and predicted activity below."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Categorical

from retreever.arguments import check_int, reject
from retreever.batch import Batch
from retreever.data.activity_file import CHANNELS, TAGS
from retreever.lab.figures.predictions import predict
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_figure, save
from retreever.train.protocols import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = ("left ankle", "right ankle", "chest", "belt")  # of the body, one per tag
COORDINATES = {"x": ("o", "#333333"), "y": ("s", "#808080"), "z": ("^", "#b5b5b5")}  # marker, colour
# Names of the classes that the merged labels of the file use.
ACTIVITIES = ("walking", "falling", "lying", "sitting", "standing up", "on all fours", "sitting on the ground")
_COLOURS = (*PALETTE[:6], "#f0e442")  # one per activity


@dataclass(frozen=True)
class Span:
    """A stretch of time with one activity."""

    start: float
    stop: float
    activity: int


def name_of(activity: int) -> str:
    """Name of a class; the last four of the eleven occur in no label."""
    return ACTIVITIES[activity] if activity < len(ACTIVITIES) else f"class {activity} (in no label)"


def spans_of(time: Float[Tensor, " n"], activities: list[int]) -> tuple[Span, ...]:
    """Spans of one activity each, cut halfway between time points of different activities, without gaps."""
    edges = [float(time[0]), *((time[1:] + time[:-1]) / 2).tolist(), float(time[-1])]
    spans, first = [], 0
    for activity, run in groupby(activities):
        last = first + len(list(run))
        spans.append(Span(edges[first], edges[last], activity))
        first = last
    return tuple(spans)


def channels_of(yc: Float[Tensor, "n 24"]) -> tuple[Float[Tensor, "n 12"], Bool[Tensor, "n 12"]]:
    """Values of the channels, and which of them were observed."""
    return yc[:, :CHANNELS], yc[:, CHANNELS:] > 0


def draw_activity(model: Model, batch: Batch, file: str | Path, window: int = 0) -> Path:
    """Draw the channels of row `window` of a batch of `ActivityTask`, true and predicted activities, to a PNG."""
    check_int("window", window, 0)
    if window >= len(batch.xc):
        reject("window", f"a row of the batch, below {len(batch.xc)}", window)
    if batch.yc.shape[2:] != (2 * CHANNELS,):
        reject("batch", f"windows of {CHANNELS} channels and their mask", f"yc of shape {tuple(batch.yc.shape)}")
    example = batch.rows(slice(window, window + 1)).to("cpu")
    dist = predict(model, example)
    if not isinstance(dist, Categorical):
        reject("model", "one that predicts classes", type(dist).__name__)
    true, predicted = example.yt[0].tolist(), dist.logits[0].argmax(dim=-1).tolist()
    right = sum(a == b for a, b in zip(true, predicted, strict=True))
    figure = new_figure(9, 7.2)
    axes: Any = figure.subplots(len(TAGS) + 1, 1, sharex=True, height_ratios=[1.0] * len(TAGS) + [0.62])
    _draw_channels(axes[:-1], example)
    _draw_strips(axes[-1], spans_of(example.xt[0, :, 0], true), spans_of(example.xt[0, :, 0], predicted))
    _legend(figure, sorted({*true, *predicted}))
    return save(figure, file, f"Accuracy {100 * right / len(true):.0f}% ({right} of {len(true)} moments)")


def _draw_channels(axes: Any, example: Batch) -> None:
    time, (values, seen) = example.xc[0, :, 0], channels_of(example.yc[0])
    for tag, axis in enumerate(axes):
        for number, name in enumerate(COORDINATES):
            channel = 3 * tag + number
            at = seen[:, channel]
            axis.plot(time[at], values[at, channel], **_look(name))
        clean(axis, "")
        axis.sharey(axes[0])
        count = int(seen[:, 3 * tag].sum())
        axis.set_title(f"{PARTS[tag]}: seen at {count} of {len(time)} moments", fontsize=9, color=STYLE["ink"], pad=3)
        axis.set_ylabel("position", fontsize=9, color=STYLE["ink"])


def _look(coordinate: str) -> dict[str, Any]:
    marker, colour = COORDINATES[coordinate]
    return {"marker": marker, "color": colour, "ms": 4.5, "mec": "white", "mew": 0.4, "lw": 0.8}


def _draw_strips(axis: Axes, true: tuple[Span, ...], predicted: tuple[Span, ...]) -> None:
    for height, spans in ((1, true), (0, predicted)):
        bars = [(span.start, span.stop - span.start) for span in spans]
        colours = [_colour(span.activity) for span in spans]
        axis.broken_barh(bars, (height - 0.38, 0.76), facecolors=colours, edgecolor="white", linewidth=0.8)
    clean(axis, "time (1 is the end of the longest window)")
    axis.grid(visible=False, axis="y")
    axis.set_yticks([1, 0], ["true", "predicted"])
    axis.set_ylim(-0.55, 1.55)


def _colour(activity: int) -> str:
    return _COLOURS[activity] if activity < len(ACTIVITIES) else STYLE["faint"]


def _legend(figure: Figure, shown: list[int]) -> None:
    """Coordinates, then the activities that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], label=name, **_look(name)) for name in COORDINATES]
    handles += [Patch(facecolor=_colour(activity), label=name_of(activity)) for activity in shown]
    legend_below(figure, handles, columns=min(7, len(handles)))
