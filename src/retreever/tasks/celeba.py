"""Image completion on CelebA (paper, section 4.2.2), from the official aligned JPEGs and partition.

Images are decoded once into a memory-mapped file of bytes under the cache root. The official validation part is kept
for validation. The paper trains on it, too; with `train_on="train+validation"` so does this task, and then validation
scores must not be used for any choice (of a checkpoint, say). Test images are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from retreever.arguments import check_choice, check_int
from retreever.data.cache import cached_file
from retreever.data.celeba_files import Partition, Pixels, Source, decode, find_celeba, fingerprint, read_partition
from retreever.errors import DataError
from retreever.files import os_errors
from retreever.tasks.images import Images, ImageTask
from retreever.tasks.padding import LAWS, Law

TrainOn = Literal["train", "train+validation"]


@dataclass(frozen=True)
class CelebATask(ImageTask):
    """CelebA faces as squares of `size` pixels a side; the paper's CelebA32 has 32."""

    path: str | Path  # folder of img_align_celeba.zip (or the folder img_align_celeba) and list_eval_partition.txt
    size: int = 32
    cache: str | Path | None = None  # cache root; by default RETREEVER_CACHE, else ~/.cache/retreever
    train_on: TrainOn = "train"  # the official training part, or, as in the paper, that and the validation part
    sizes: Law = "batch"  # numbers of pixels to train on, one for a "batch" or one for "each" image
    name = "celeba"

    def __post_init__(self) -> None:
        check_int("size", self.size, 2)
        check_choice("train_on", self.train_on, ("train", "train+validation"))
        check_choice("sizes", self.sizes, LAWS)

    @property
    def training_images(self) -> Images:
        """Images of the official training and validation parts."""
        return self.images[: self.partition.ends[1]]

    @property
    def test_images(self) -> Images:
        """Images of the official test part."""
        return self.images[self.partition.ends[1] :]

    @cached_property
    def split(self) -> tuple[Images, Images]:
        """Images trained on (`train_on`), and the official validation part."""
        train, validation, _ = self.partition.ends
        trained = train if self.train_on == "train" else validation
        return self.images[:trained], self.images[train:validation]

    @cached_property
    def partition(self) -> Partition:
        """Names of all images, and where each part ends."""
        return read_partition(find_celeba(self.path).partition)

    @cached_property
    def images(self) -> Images:
        """All images: training, validation and test part, in the order of the partition file."""
        return torch.from_numpy(load_celeba(find_celeba(self.path), self.partition, self.size, self.cache))


def load_celeba(source: Source, partition: Partition, size: int, cache: str | Path | None = None) -> Pixels:
    """The images, memory-mapped from the cache; decoded in memory where the cache cannot be written."""
    settings = {"size": size, "source": fingerprint(source, partition.names), "version": 1}
    file = cached_file(f"celeba-{size}.npy", settings, lambda: _npy(source, partition, size), cache)
    if file is None:
        return np.concatenate([*decode(source, partition.names, size)])
    with os_errors(file, "cannot be read", DataError):
        return np.load(file, mmap_mode="c", allow_pickle=False)  # private to the process: the file never changes


def _npy(source: Source, partition: Partition, size: int) -> Iterator[bytes]:
    header = BytesIO()
    shape = (len(partition.names), size, size, 3)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    yield header.getvalue()
    for piece in decode(source, partition.names, size):
        yield piece.tobytes()
