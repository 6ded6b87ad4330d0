"""Human Activity (paper, section 4.2.3): the activity of a person at each of 50 time points of a recording.

The context is the 50 time points of a window: the coordinates of four body tags (12 channels), zeros where not seen,
and a mask of the channels seen. The queries are the same 50 times, the answers one of eleven classes, of which labels
use seven (see `activity_file`). Values are not normalised; times start at 0.

The paper's split shuffles windows that overlap by half, so that training windows overlap test windows: its accuracies
are those of a leaking split. In the split "recording" no recording is in two parts, though people are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.distributions import Categorical, Distribution

from retreever.arguments import check_choice, check_int, check_path, reject
from retreever.batch import Batch
from retreever.data.activity_file import Recording, find_file, read_rows, recordings_of
from retreever.errors import DataError
from retreever.files import os_errors
from retreever.tasks.padding import Room, Sizes
from retreever.tasks.seeds import stream

Split = Literal["paper", "recording"]
Part = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
WINDOW, STRIDE = 50, 25


class Windows(NamedTuple):
    """Windows of all recordings; `recording` is the number of the recording of each window."""

    time: Int64[np.ndarray, "w 50"]
    values: Float32[np.ndarray, "w 50 24"]
    classes: Int64[np.ndarray, "w 50"]
    recording: Int64[np.ndarray, " w"]


class Indices(NamedTuple):
    """Indices of the windows, or recordings, of each part."""

    train: Int64[np.ndarray, " a"]
    validation: Int64[np.ndarray, " b"]
    test: Int64[np.ndarray, " c"]


@dataclass(frozen=True)
class ActivityTask:
    """Human Activity from the official file."""

    path: str | Path  # the file ConfLongDemo_JSI.txt or ConfLongDemo_JSI.txt.gz, or the folder it lies in
    split: Split = "paper"  # windows at random, which leaks, or "recording": no recording in two parts
    crop: int = 0  # training windows lose up to so many of their first points, at random
    test_batches: ClassVar[int] = 1  # all windows at once

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_choice("split", self.split, SPLITS)
        check_int("crop", self.crop, 0)
        if self.crop >= WINDOW:
            reject("crop", f"fewer than the {WINDOW} points of a window", self.crop)

    @property
    def sizes(self) -> dict[Part, int]:
        """Windows in each part."""
        return {name: len(self._part(name).xc) for name in ("train", "validation", "test")}

    def training(self, seed: int) -> torch.Generator:
        """The generator that chooses training windows for `seed`."""
        return stream(f"activity-{self.split}", "train", seed)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """`size` windows of the training part, drawn with replacement."""
        check_int("size", size, 1)
        part = self._part("train", device)
        chosen = torch.randint(len(part.xc), (size,), generator=generator, device=generator.device).to(device)
        time = part.xc[chosen]
        batch = Batch(xc=time, yc=part.yc[chosen], xt=time, yt=part.yt[chosen])
        return cropped(batch, self.crop, generator) if self.crop else batch

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """All windows are of one length."""
        return Sizes(WINDOW, WINDOW, Room(WINDOW, WINDOW))

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Tensor, room: Room) -> Batch:
        """Same as `sample`, on the generator's device."""
        return self.sample(size, generator, generator.device)

    def validation(self, size: int = 0) -> Iterator[Batch]:
        """The validation part, `size` windows at a time; 0 gives all at once, so that time points count equally."""
        return self._fixed("validation", size)

    def test(self, size: int = 0) -> Iterator[Batch]:
        """The test part, as `validation`."""
        return self._fixed("test", size)

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        """Accuracy in per cent, one value per time point (b, 50)."""
        assert isinstance(dist, Categorical)
        return 100.0 * (dist.logits.argmax(dim=-1) == batch.yt).to(batch.xt.dtype)

    @cached_property
    def _parts(self) -> dict[str, dict[Part, Batch]]:
        """Parts by device; kept in memory, so later changes of the file have no effect."""
        return {"cpu": _load(find_file(self.path), self.split)}

    def _part(self, name: Part, device: torch.device | str = "cpu") -> Batch:
        parts = self._parts.setdefault(str(device), {})
        if name not in parts:
            parts[name] = self._parts["cpu"][name].to(device)
        return parts[name]

    def _fixed(self, name: Part, size: int) -> Iterator[Batch]:
        check_int("size", size, 0)
        part = self._part(name)
        every = size or len(part.xc)
        return (part.rows(slice(start, start + every)) for start in range(0, len(part.xc), every))


def cropped(batch: Batch, most: int, generator: torch.Generator) -> Batch:
    """Windows without 0 to `most` of their first points; times start at 0 again.

    A causal model knows little at the start of a window; where windows start is chance, so every point may be a start.
    """
    rows, points = batch.xc.shape[:2]
    gone = torch.randint(most + 1, (rows, 1), generator=generator, device=generator.device).to(batch.xc.device)
    time = (batch.xc - batch.xc.gather(1, gone[..., None])).clamp_min(0)
    real = torch.arange(points, device=gone.device) >= gone
    return replace(batch, xc=time, xt=time, context_mask=real, target_mask=real)


def windows_of(recordings: list[Recording]) -> Windows:
    """Windows of 50 time points, every 25, that end before the last time point; sorted by time, which starts at 0."""
    ends = np.cumsum([len(recording.time) for recording in recordings])
    cuts = [
        (number, start)
        for number, (recording, end) in enumerate(zip(recordings, ends, strict=True))
        for start in range(end - len(recording.time), end - WINDOW, STRIDE)
    ]
    number, start = np.array(cuts, dtype=np.int64).reshape(-1, 2).T
    points = start[:, None] + np.arange(WINDOW)  # (w, 50), into all recordings laid end to end
    at = np.concatenate([recording.time for recording in recordings])
    values = np.concatenate([np.hstack([recording.values, recording.mask]) for recording in recordings])
    classes = np.concatenate([recording.labels.argmax(axis=1) for recording in recordings])
    order = at[points].argsort(axis=1, kind="stable")  # clocks sometimes step back by some milliseconds
    points = np.take_along_axis(points, order, axis=1)
    return Windows(at[points] - at[points[:, :1]], values[points], classes[points], number)


def shuffled_indices(n: int) -> Indices:
    """The paper's parts of n: a fifth for test with seed 42, then a fifth of the rest for validation with seed 11."""
    rest, test = _fifth(np.arange(n), 42)
    train, validation = _fifth(rest, 11)
    return Indices(train, validation, test)


def recording_indices(recording: Int64[np.ndarray, " w"]) -> Indices:
    """Parts that share no recording: recordings are split as the paper splits windows."""
    present = np.unique(recording)
    parts = shuffled_indices(len(present))
    return Indices(*(np.flatnonzero(np.isin(recording, present[part])) for part in parts))


def _fifth(items: Int64[np.ndarray, " n"], seed: int) -> tuple[Int64[np.ndarray, " a"], Int64[np.ndarray, " b"]]:
    """Four fifths and one fifth (rounded up) of `items`, shuffled as scikit-learn's `train_test_split` does."""
    shuffled = items[np.random.RandomState(seed).permutation(len(items))]
    fifth = -(-len(items) // 5)
    return shuffled[fifth:], shuffled[:fifth]


@lru_cache(maxsize=2)
def _windows(file: Path, state: tuple[int, int]) -> Windows:
    """Windows of the file, cached as long as its time and size (`state`) stay the same."""
    return windows_of(recordings_of(read_rows(file)))


def _load(file: Path, split: Split) -> dict[Part, Batch]:
    with os_errors(file, "cannot be read", DataError):
        state = file.stat()
    windows = _windows(file.resolve(), (state.st_mtime_ns, state.st_size))
    indices = shuffled_indices(len(windows.time)) if split == "paper" else recording_indices(windows.recording)
    sizes = [len(part) for part in indices]
    if 0 in sizes:
        raise DataError(f"{file}: expected windows for training, validation and test by {split}, got {sizes}")
    train, validation, test = (_batch(windows, part) for part in indices)
    return {"train": train, "validation": validation, "test": test}


def _batch(windows: Windows, chosen: Int64[np.ndarray, " k"]) -> Batch:
    """The windows `chosen`. As in the public code, times are divided by the largest time of the part."""
    time = windows.time[chosen]
    at = torch.from_numpy((time / max(1, time.max())).astype(np.float32))[..., None]
    return Batch(at, torch.from_numpy(windows.values[chosen]), at, torch.from_numpy(windows.classes[chosen]))
