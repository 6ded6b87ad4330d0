"""Image completion in pictures: the pixels given, what the model makes of them, how sure it is, and the truth.

Needs matplotlib (the extra `plot`), imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.batch import Batch
from retreever.checks import check_tensor
from retreever.lab.figures.predictions import mean_and_std, predict
from retreever.lab.figures.style import STYLE, new_figure, save
from retreever.tasks.images import places, values
from retreever.tasks.seeds import stream
from retreever.train.protocols import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

NEUTRAL = (0.60, 0.71, 0.82)  # where no pixel is given: neither black, white nor grey
_CELL = 0.95  # width of a picture, in inches
_GAP = 0.06  # between pictures, in their width
_COLUMNS = ("context", "mean", "std")


@dataclass(frozen=True)
class Completion:
    """Completions of some images, all from 0 to 1: what was given (on a neutral ground), mean, std, truth.

    The standard deviation is one number per pixel, the root mean square over its channels.
    """

    given: Float[Tensor, "b h w 3"]
    mean: Float[Tensor, "b h w c"]
    std: Float[Tensor, "b h w"]
    truth: Float[Tensor, "b h w c"]


def complete_all(model: Model, images: UInt8[Tensor, "b h w c"], context: int, seed: int = 0) -> Completion:
    """Predict every pixel from `context` of them, drawn for every image; a larger context holds the smaller ones."""
    _check_images(images)
    b, h, w, c = images.shape
    check_int("context", context, 1)
    if context > h * w:
        reject("context", f"at most the {h * w} pixels of an image", context)
    generator = stream("figure-images", "validation", seed)
    given = torch.rand(b, h * w, generator=generator).argsort(dim=1, stable=True)[:, :context]
    every = torch.arange(h * w).expand(b, -1)
    images = images.cpu()
    batch = Batch(places(given, h, w), values(images, given), places(every, h, w), values(images, every))
    mean, std = mean_and_std(predict(model, batch))
    shown = torch.tensor(NEUTRAL).repeat(b, h * w, 1)
    shown.scatter_(1, given[..., None].expand(-1, -1, 3), (batch.yc + 0.5).expand(-1, -1, 3))
    return Completion(
        given=shown.reshape(b, h, w, 3),
        mean=(mean + 0.5).clamp(0, 1).reshape(b, h, w, c),
        std=std.square().mean(dim=-1).sqrt().reshape(b, h, w),
        truth=images / 255,
    )


def draw_completions(
    model: Model,
    images: UInt8[Tensor, "b h w c"],
    file: str | Path,
    context: Sequence[int] = (50, 100, 150),
    seed: int = 0,
    title: str | None = None,
) -> Path:
    """Draw a row per image: context, mean and standard deviation for every size of context, then the truth.

    Args:
        model: predicts values with a mean and a standard deviation.
        images: bytes, of one channel or three; for an honest picture none the model was trained on.
        file: a PNG, replaced in one go; folders are made.
        context: numbers of pixels given.
        seed: of the pixels.
        title: over the whole picture.
    """
    _check_images(images)
    if not context:
        reject("context", "at least one number of pixels", "none")
    done = [complete_all(model, images, size, seed) for size in context]
    layout = _Layout(len(images), len(context), images.shape[1] / images.shape[2], 0.35 * bool(title))
    figure = new_figure(layout.width, layout.height)
    figure.set_layout_engine("none")  # pictures stand in a grid known beforehand
    most = max(float(completion.std.max()) for completion in done)
    for group, (size, completion) in enumerate(zip(context, done, strict=True)):
        spread = _draw_group(figure, layout, group, completion, most)
        caption = f"{size} of {images.shape[1] * images.shape[2]} pixels given"
        _write(figure, layout.left(group, 1) + 0.5, layout.below, caption, 10)
    for row, truth in enumerate(done[0].truth):
        _show(_cell(figure, layout, len(context), 0, row), truth)
    _write(figure, layout.left(len(context), 0) + 0.5, layout.above, "truth", 9)
    _colour_bar(figure, layout, spread)
    return save(figure, file, title)


@dataclass(frozen=True)
class _Layout:
    """Where pictures stand, in pictures (one is a unit wide); groups of columns are a little apart."""

    rows: int
    groups: int
    aspect: float  # height by width
    head: float  # room for a title, in inches

    @property
    def width(self) -> float:
        """Of the figure, in inches."""
        return _CELL * (self.left(self.groups, 1) + 0.95)

    @property
    def height(self) -> float:
        """Of the figure, in inches."""
        return _CELL * (self.rows * (self.aspect + _GAP) + 0.7) + self.head

    @property
    def above(self) -> float:
        """Height of the names over the columns."""
        return self.bottom(0) + self.aspect + 0.13

    @property
    def below(self) -> float:
        """Height of the captions under the groups."""
        return 0.2

    def left(self, group: int, column: int) -> float:
        """Of a picture."""
        return 0.1 + group * (3 * (1 + _GAP) + 0.12) + column * (1 + _GAP)

    def bottom(self, row: int) -> float:
        """Of a picture; row 0 is the topmost."""
        return 0.4 + (self.rows - 1 - row) * (self.aspect + _GAP)


def _cell(figure: Figure, layout: _Layout, group: int, column: int, row: int) -> Axes:
    """An empty frame for one picture."""
    x, y = _CELL * layout.left(group, column), _CELL * layout.bottom(row)
    w, h = layout.width, layout.height
    axis = figure.add_axes((x / w, y / h, _CELL / w, _CELL * layout.aspect / h))
    axis.axis("off")
    return axis


def _draw_group(figure: Figure, layout: _Layout, group: int, completion: Completion, most: float) -> AxesImage:
    """Three columns of one size of context; gives one of the standard deviations, for the colour bar."""
    for row, (given, mean, std) in enumerate(zip(completion.given, completion.mean, completion.std, strict=True)):
        _show(_cell(figure, layout, group, 0, row), given)
        _show(_cell(figure, layout, group, 1, row), mean)
        spread = _cell(figure, layout, group, 2, row).imshow(
            std.numpy(), cmap="magma", vmin=0, vmax=most, aspect="auto"
        )
    for column, name in enumerate(_COLUMNS):
        _write(figure, layout.left(group, column) + 0.5, layout.above, name, 9)
    return spread


def _colour_bar(figure: Figure, layout: _Layout, spread: AxesImage) -> None:
    top, low = layout.bottom(0) + layout.aspect, layout.bottom(layout.rows - 1)
    x, w, h = layout.left(layout.groups, 1) + 0.12, layout.width, layout.height
    axis = figure.add_axes((_CELL * x / w, _CELL * low / h, 0.1 / w, _CELL * (top - low) / h))
    bar = figure.colorbar(spread, cax=axis)
    bar.set_label("std, of values from 0 to 1", fontsize=8, color=STYLE["ink"])
    axis.tick_params(labelsize=7, length=0, colors=STYLE["ink"])
    axis.locator_params(axis="y", nbins=5)
    bar.outline.set_visible(False)


def _write(figure: Figure, x: float, y: float, text: str, size: float) -> None:
    place = _CELL * x / figure.get_figwidth(), _CELL * y / figure.get_figheight()
    figure.text(*place, text, ha="center", va="center", fontsize=size, color=STYLE["ink"])


def _show(axis: Axes, picture: Float[Tensor, "h w c"]) -> None:
    axis.imshow(picture.expand(-1, -1, 3).numpy(), aspect="auto")


def _check_images(images: Tensor) -> None:
    check_tensor("images", images, "b h w c")
    if images.dtype != torch.uint8 or images.shape[-1] not in (1, 3) or len(images) == 0:
        reject("images", "bytes (b, h, w, c) of 1 or 3 channels", f"{images.dtype} {tuple(images.shape)}")
