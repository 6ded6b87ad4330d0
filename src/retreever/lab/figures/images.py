"""Figures of image completion: the pixels given, predicted mean and standard deviation, and the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

NEUTRAL = (0.60, 0.71, 0.82)  # colour of pixels not given: neither black, white nor grey
_CELL = 1.0  # width of a picture, in inches
_COLUMNS = ("context", "mean", "std")


@dataclass(frozen=True)
class Completion:
    """Completions of some images, values from 0 to 1: given pixels (NEUTRAL elsewhere), mean, std, truth.

    The standard deviation is one number per pixel, the root mean square over its channels.
    """

    given: Float[Tensor, "b h w 3"]
    mean: Float[Tensor, "b h w c"]
    std: Float[Tensor, "b h w"]
    truth: Float[Tensor, "b h w c"]


def complete_all(model: Model, images: UInt8[Tensor, "b h w c"], context: int, seed: int = 0) -> Completion:
    """Predict every pixel from `context` of them, drawn for every image; a larger context holds the smaller ones."""
    check_tensor("images", images, "b h w c")
    if images.dtype != torch.uint8 or images.shape[-1] not in (1, 3) or len(images) == 0:
        reject("images", "bytes (b, h, w, c) of 1 or 3 channels", f"{images.dtype} {tuple(images.shape)}")
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
) -> Path:
    """Draw a row per image to the PNG `file`: context, mean and standard deviation for every `context`, then the truth.

    `context` are numbers of pixels given, which `seed` draws. The images should not be ones the model was trained on.
    """
    if not context:
        reject("context", "at least one number of pixels", "none")
    done = [complete_all(model, images, size, seed) for size in context]
    columns, aspect = 3 * len(context) + 1, images.shape[1] / images.shape[2]
    figure = new_figure(_CELL * columns + 0.9, _CELL * aspect * len(images) + 0.9)
    room = 0.3 / figure.get_figheight()  # for captions below the pictures
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0, hspace=0, rect=(0, room, 1, 1 - room))
    panels: Any = figure.subplots(len(images), columns, squeeze=False)
    most = max(float(completion.std.max()) for completion in done)
    for index, (size, completion) in enumerate(zip(context, done, strict=True)):
        own = panels[:, 3 * index : 3 * index + 3]
        spread = _draw_columns(own, completion, most)
        caption = f"{size} of {images[0, ..., 0].numel()} pixels given"
        look: dict[str, Any] = {"transform": own[-1, 1].transAxes, "ha": "center", "color": STYLE["ink"]}
        own[-1, 1].text(0.5, -0.24, caption, fontsize=10, in_layout=False, **look)
    for axis, truth in zip(panels[:, -1], done[0].truth, strict=True):
        axis.imshow(truth.expand(-1, -1, 3).numpy())
    panels[0, -1].set_title("truth", fontsize=9, color=STYLE["ink"])
    for axis in panels.flat:
        axis.axis("off")
    _colour_bar(figure, panels, spread)
    return save(figure, file)


def _draw_columns(panels: Any, completion: Completion, most: float) -> AxesImage:
    """Draw the three columns of one size of context; returns an image of a standard deviation, for the colour bar."""
    for axes, given, mean, std in zip(panels, completion.given, completion.mean, completion.std, strict=True):
        axes[0].imshow(given.numpy())
        axes[1].imshow(mean.expand(-1, -1, 3).numpy())
        spread: AxesImage = axes[2].imshow(std.numpy(), cmap="magma", vmin=0, vmax=most)
    for axis, name in zip(panels[0], _COLUMNS, strict=True):
        axis.set_title(name, fontsize=9, color=STYLE["ink"])
    return spread


def _colour_bar(figure: Figure, panels: Any, spread: AxesImage) -> None:
    bar = figure.colorbar(spread, ax=panels, aspect=40, pad=0.01)
    bar.set_label("std, of values from 0 to 1", fontsize=8, color=STYLE["ink"])
    bar.ax.tick_params(labelsize=7, length=0, colors=STYLE["ink"])
    bar.ax.locator_params(axis="y", nbins=5)
    bar.outline.set_visible(False)
