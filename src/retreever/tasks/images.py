"""Image completion (paper, section 4.2.2): predict pixels of an image from given ones.

Per batch the context has N ~ U{3..196} pixels and the target M ~ U{3..199-N}, drawn without replacement for every
image. A pixel's place is (row, column), each from -1 to 1; its value is that of its channels, from -0.5 to 0.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import check_choice, check_int, reject
from retreever.batch import Batch
from retreever.data.idx import find_idx, read_labelled
from retreever.errors import BackendError, DataError
from retreever.tasks.padding import LAWS, Law, Room, Sizes, balanced_sizes, context_sizes, divide, draw_sizes, rooms_for
from retreever.tasks.seeds import stream

MOST_PIXELS = 200
ROOMS = rooms_for(MOST_PIXELS, (64, 128, MOST_PIXELS - 4), parts=2)
EACH = Room(MOST_PIXELS - 4, 64)
FIXED_BATCH = 16
DIGITS, CLASSES = 10, 47

Images = UInt8[Tensor, "count h w c"]
Part = Literal["train", "test"]
Classes = Literal["seen", "unseen"]


class ImageTask(ABC):
    """Completion of the images a subclass provides: `name`, `validation_images`, `training_images`, `test_images`.

    `sizes` says how many pixels training tasks have: one number for a "batch", as in the paper, or one for "each"
    image, with 64 targets.

    Some of the training images, always the same, are kept for validation and never trained on.
    """

    name: str
    validation_images: int
    sizes: Law = "batch"

    @property
    @abstractmethod
    def training_images(self) -> Images:
        """Images to train on, those for validation among them."""

    @property
    @abstractmethod
    def test_images(self) -> Images:
        """Images to test on."""

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """`size` training images drawn at random."""
        check_int("size", size, 1)
        if self.sizes == "each":
            n, m, room = self.draw_sizes(generator)
            return self.sample_padded(size, generator, torch.tensor([n, m], device=generator.device), room).to(device)
        images = self._trained_on(torch.device(device))
        rows = torch.randint(len(images), (size,), generator=generator, device=generator.device)
        return complete(images[rows.to(images.device)], generator).to(device)

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """Numbers of pixels for a batch, and the room they need."""
        return draw_sizes(MOST_PIXELS, ROOMS, generator) if self.sizes == "batch" else Sizes(*EACH, EACH)

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Int64[Tensor, " 2"], room: Room) -> Batch:
        """Same as `sample`, on the generator's device, padded to `room` and masked."""
        images = self._trained_on(generator.device)
        if images.device.type != generator.device.type:
            raise BackendError(f"{self.name}: the images do not fit on {generator.device}; train with --no-graph")
        rows = torch.randint(len(images), (size,), generator=generator, device=generator.device)
        noise = torch.rand(size, images.shape[1] * images.shape[2], generator=generator, device=generator.device)
        per_task = self.sizes == "each"
        n = context_sizes(MOST_PIXELS, size, generator) if per_task else sizes[0]
        pixels = noise.argsort(dim=1, stable=True)[:, : sum(room) if per_task else min(MOST_PIXELS - 1, sum(room))]
        return divide(places(pixels, *images.shape[1:3]), values(images[rows], pixels), n, sizes[1], room)

    def training(self, seed: int) -> torch.Generator:
        """The generator of the training batches of `seed`."""
        return stream(self.name, "train", seed)

    def validation(self) -> Iterator[Batch]:
        """Fixed tasks for validation; their images are never trained on, never tested on."""
        return _fixed(self.split[1], stream(self.name, "validation", 0))

    def test(self) -> Iterator[Batch]:
        """The fixed test set: the images in order, 16 a batch, one task each."""
        return _fixed(self.test_images, stream(self.name, "test", 0))

    @property
    def test_batches(self) -> int:
        """Batches of the test set."""
        return -(-len(self.test_images) // FIXED_BATCH)

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        """Log-likelihood of every target (b, m), summed over channels."""
        return dist.log_prob(batch.yt)

    @cached_property
    def split(self) -> tuple[Images, Images]:
        """Images trained on, and images for validation."""
        images, kept = self.training_images, self.validation_images
        if kept >= len(images):
            reject("validation_images", f"fewer than the {len(images)} training images", kept)
        order = torch.randperm(len(images), generator=stream(f"{self.name}-split", "validation", 0))
        return images[order[kept:].sort().values], images[order[:kept].sort().values]

    def _trained_on(self, device: torch.device) -> Images:
        """Training images as bytes on that device, copied once; where they do not fit, on their own device."""
        if device.type not in self._copies:
            images = self.split[0]
            self._copies[device.type] = images.to(device) if _fits(images, device) else images
        return self._copies[device.type]

    @cached_property
    def _copies(self) -> dict[str, Images]:
        return {}


@dataclass(frozen=True)
class EmnistTask(ImageTask):
    """EMNIST 'balanced': training on digits; test on other digits or on classes never seen, letters."""

    path: str | Path  # folder of the official files, emnist-balanced-train-images-idx3-ubyte and so on, plain or .gz
    classes: Classes = "seen"  # of the test images: "seen" (0 to 9) or "unseen" (10 to 46)
    validation_images: int = 1_600  # how many of the training images are kept for validation
    sizes: Law = "batch"  # numbers of pixels to train on, one for a "batch" or one for "each" image
    name = "emnist"

    def __post_init__(self) -> None:
        check_choice("classes", self.classes, ("seen", "unseen"))
        check_int("validation_images", self.validation_images, 1)
        check_choice("sizes", self.sizes, LAWS)

    @cached_property
    def training_images(self) -> Images:
        """The digits of the training files."""
        return load_emnist(self.path, "train", "seen")

    @cached_property
    def test_images(self) -> Images:
        """Images of `classes` in the test files."""
        return load_emnist(self.path, "test", self.classes)


def read_emnist(path: str | Path, part: Part) -> tuple[Path, UInt8[Tensor, "count w h"], UInt8[Tensor, " count"]]:
    """The file of the labels of one part, all images as the files hold them, and their labels."""
    labels_file = find_idx(path, f"emnist-balanced-{part}-labels-idx1-ubyte")
    images, labels = read_labelled(find_idx(path, f"emnist-balanced-{part}-images-idx3-ubyte"), labels_file)
    if int(labels.max()) >= CLASSES:
        raise DataError(f"{labels_file}: expected labels from 0 to {CLASSES - 1}, got {int(labels.max())}")
    return labels_file, images, labels


def load_emnist(path: str | Path, part: Part, classes: Classes) -> Images:
    """Upright images of the seen (0 to 9) or unseen classes (10 to 46); the files hold them transposed."""
    labels_file, images, labels = read_emnist(path, part)
    wanted = labels < DIGITS if classes == "seen" else labels >= DIGITS
    if not bool(wanted.any()):
        raise DataError(f"{labels_file}: expected some labels of {classes} classes, got none")
    return images[wanted].mT.contiguous()[..., None]


def complete(
    images: UInt8[Tensor, "b h w c"], generator: torch.Generator, sizes: tuple[int, int] | None = None
) -> Batch:
    """One random task per image, on the device of the images; the pixels drawn are the same on all devices.

    `sizes` are the numbers of context and target pixels; None draws them.
    """
    b, h, w, _ = images.shape
    if h * w < MOST_PIXELS - 1 or min(h, w) < 2:
        reject("images", f"at least {MOST_PIXELS - 1} pixels in two or more rows and columns", f"{h} x {w}")
    n, m = sizes or draw_sizes(MOST_PIXELS, ROOMS, generator)[:2]
    noise = torch.rand(b, h * w, generator=generator, device=generator.device).to(images.device)
    pixels = noise.argsort(dim=1, stable=True)[:, : n + m]
    x, y = places(pixels, h, w), values(images, pixels)
    return Batch(xc=x[:, :n], yc=y[:, :n], xt=x[:, n:], yt=y[:, n:])


def places(pixels: Int64[Tensor, "b p"], height: int, width: int) -> Float[Tensor, "b p 2"]:
    """(row, column) of pixels counted row by row, each from -1 to 1."""
    row, column = pixels // width, pixels % width
    return torch.stack([2 * row / (height - 1) - 1, 2 * column / (width - 1) - 1], dim=-1)


def values(images: UInt8[Tensor, "b h w c"], pixels: Int64[Tensor, "b p"]) -> Float[Tensor, "b p c"]:
    """Channels of pixels counted row by row, each from -0.5 to 0.5."""
    index = pixels[..., None].expand(-1, -1, images.shape[-1])
    return images.flatten(1, 2).gather(1, index) / 255 - 0.5


def _fits(images: Images, device: torch.device) -> bool:
    """Whether the images take at most half of the free memory of a device."""
    return device.type != "cuda" or images.nbytes <= torch.cuda.mem_get_info(device)[0] // 2


def _fixed(images: Images, generator: torch.Generator) -> Iterator[Batch]:
    sizes = balanced_sizes(MOST_PIXELS, generator)
    for start in range(0, len(images), FIXED_BATCH):
        yield complete(images[start : start + FIXED_BATCH], generator, next(sizes))
