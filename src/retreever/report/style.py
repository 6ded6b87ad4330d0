"""The one style of all figures, and how they reach the disk.

Needs matplotlib (the extra `plot`), imported on first use. No pyplot: nothing global, safe in threads and headless.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from retreever.errors import BackendError
from retreever.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {"font": "sans-serif", "ink": "#333333", "faint": "#d4d4d4", "grid": "#ebebeb"}
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#555555")  # safe for colour-blind eyes
DASHES = ("-", "--", ":")  # taken in turn once the palette is used up
DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise BackendError("figures need matplotlib: pip install 'retreever[plot]'") from error
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.1)  # inches around panels
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def clean(axis: Axes, label: str) -> None:
    """Light grid, no top and right spines; `label` names the x axis."""
    axis.grid(color=STYLE["grid"], linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(STYLE["faint"])
    axis.tick_params(colors=STYLE["ink"], length=0)
    axis.set_xlabel(label, color=STYLE["ink"])
    axis.margins(x=0.02)


def save(figure: Figure, file: str | Path, title: str | None = None) -> Path:
    """Write a PNG in one step, so that a reader never sees half a picture."""
    from matplotlib.text import Text

    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=STYLE["ink"])
    for text in figure.findobj(lambda artist: isinstance(artist, Text)):
        text.set(fontfamily=STYLE["font"])
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return write_bytes(file, picture.getvalue())
