"""Style of all figures, and how they are saved.

No pyplot: nothing global, safe in threads and headless.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.errors import BackendError
from retreever.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {"font": "sans-serif", "ink": "#333333", "faint": "#d4d4d4", "grid": "#ebebeb"}
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#555555")  # safe for colour-blind eyes
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


def new_panels(count: int, titled: bool) -> tuple[Figure, list[Axes], list[Axes]]:
    """A figure with room for a title and a legend, its `count` panels, and the leftmost ones of them."""
    columns = 2 if count == 4 else min(3, count)
    down = -(-count // columns)
    figure = new_figure(max(5.2, 4.2 * columns), 3.6 * down + 0.7 + 0.3 * titled)
    panels: list[Axes] = list(figure.subplots(down, columns, squeeze=False).flat)
    for axis in panels[count:]:
        axis.axis("off")
    return figure, panels[:count], panels[:count:columns]


def room_between(low: float, high: float) -> tuple[float, float]:
    """Limits of a y axis from `low` to `high`, widened to at least a fiftieth of their size."""
    missing = max(0.0, 0.02 * max(abs(low), abs(high)) - (high - low))
    return low - missing / 2, high + missing / 2


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int = 0, size: float = 9) -> None:
    """Draw a legend below all panels; without `columns`, in as many lines as its longest label requires."""
    if not columns:
        inches = 0.6 + 0.075 * max(len(str(handle.get_label())) for handle in handles)  # a letter takes 0.07 or so
        lines = -(-len(handles) // max(1, int(figure.get_figwidth() / inches)))
        columns = -(-len(handles) // lines)
    look: dict[str, Any] = {"frameon": False, "labelcolor": STYLE["ink"], "fontsize": size}
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **look)


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
    """Write the figure to a PNG atomically."""
    from matplotlib.text import Text

    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=STYLE["ink"])
    for text in figure.findobj(lambda artist: isinstance(artist, Text)):
        text.set(fontfamily=STYLE["font"])
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return write_bytes(file, picture.getvalue())
