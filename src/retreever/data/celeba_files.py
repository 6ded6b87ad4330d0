"""The official files of CelebA: aligned JPEGs in a folder or zip, and the partition that says which part has which.

Images are squashed whole to a square by Pillow's bicubic filter, not cropped, as in the public code behind the
published numbers. Pillow (the extra `data`) is imported on first use.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from retreever.data.unpack import by_name, open_zip, read_entry, safe_entries
from retreever.errors import BackendError, DataError
from retreever.files import os_errors, read_bytes

IMAGES, PARTITION = "img_align_celeba", "list_eval_partition.txt"
PARTS = ("train", "validation", "test")
MOST_PIXELS = 2**20  # of one image; the official ones have 38,804
MOST_BYTES = 4 * MOST_PIXELS  # of one JPEG
MOST_PARTITION = 2**24  # bytes of the partition; the official one has 2.8 MB
PIECE = 64  # images decoded by one thread at a time
Pixels = UInt8[np.ndarray, "count size size 3"]


class Partition(NamedTuple):
    """Names of all images: training, validation and test part, each in the order of the file; and where parts end."""

    names: tuple[str, ...]
    ends: tuple[int, int, int]


class Source(NamedTuple):
    """The two files: JPEGs (a zip or a folder) and partition."""

    images: Path
    partition: Path


def find_celeba(path: str | Path) -> Source:
    """Both in the folder `path`, or in its Img and Eval, as they are given away."""
    folder = Path(path)
    images = [folder / sub / name for sub in ("", "Img") for name in (f"{IMAGES}.zip", IMAGES)]
    partitions = [folder / sub / PARTITION for sub in ("", "Eval")]
    found = [next((place for place in places if place.exists()), None) for places in (images, partitions)]
    for place, looked in zip(found, (images, partitions), strict=True):
        if place is None:
            raise DataError(f"{folder}: expected {' or '.join(str(p.relative_to(folder)) for p in looked)}, found none")
    return Source(*found)  # type: ignore[arg-type]


def read_partition(file: Path) -> Partition:
    """Read and check every line, `000001.jpg 0`; a fault raises `DataError` naming file and line."""
    parts: list[list[str]] = [[] for _ in PARTS]
    seen: set[str] = set()
    try:
        lines = read_bytes(file, MOST_PARTITION, DataError).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: expected plain text, got {error}") from error
    for line, row in enumerate(lines, start=1):
        name, _, part = row.strip().partition(" ")
        part = part.strip()
        if part not in ("0", "1", "2") or not name or "/" in name or "\\" in name:
            raise DataError(f"{file}, line {line}: expected an image and its part, as in '000001.jpg 0', got {row!r}")
        if name in seen:
            raise DataError(f"{file}, line {line}: expected every image once, got {name} again")
        seen.add(name)
        parts[int(part)].append(name)
    if not all(parts):
        raise DataError(f"{file}: expected images in all three parts, got {[len(part) for part in parts]}")
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return Partition(tuple(name for part in parts for name in part), tuple(ends))


def fingerprint(source: Source, names: Sequence[str]) -> str:
    """Changes with the names and with size or time of any file to be read; a folder is asked for every image."""
    files = [source.images / name for name in names] if source.images.is_dir() else [source.images]
    found = hashlib.sha256("\n".join(names).encode())
    for file in files:
        with os_errors(file, "cannot be read", DataError), suppress(FileNotFoundError):  # the reader names absent ones
            state = file.stat()
            found.update(f"\n{state.st_size} {state.st_mtime_ns}".encode())
    return found.hexdigest()


def decode(source: Source, names: Sequence[str], size: int) -> Iterator[Pixels]:
    """The images in order, some at a time, decoded by as many threads as there are cores; says how far it is."""
    try:  # say what is missing before any work is done
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise BackendError('CelebA needs pillow to read JPEGs: pip install "retreever[data]"') from error
    pieces = [names[start : start + PIECE] for start in range(0, len(names), PIECE)]
    with reader(source, names) as read, ThreadPoolExecutor(_cores()) as pool:
        done, told = 0, time.monotonic()
        work = pool.map(lambda piece: np.stack([_pixels(*read(name), size) for name in piece]), pieces)
        for piece in work:
            yield piece
            done += len(piece)
            if time.monotonic() - told > 2 or done == len(names):
                told = time.monotonic()
                print(f"celeba: {done:,} of {len(names):,} images decoded", file=sys.stderr, flush=True)


@contextmanager
def reader(source: Source, names: Sequence[str]) -> Iterator[Callable[[str], tuple[str, bytes]]]:
    """A function that gives where an image is, in words, and its bytes; images that are absent are named first."""
    with ExitStack() as stack:
        if source.images.is_dir():
            present: dict[str, zipfile.ZipInfo | None] = dict.fromkeys(os.listdir(source.images))
            archive = None
        else:
            archive = stack.enter_context(open_zip(source.images))
            present = {**by_name(safe_entries(archive, source.images), source.images, frozenset(names))}
        absent = [name for name in names if name not in present]
        if absent:
            more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
            raise DataError(f"{source.partition}: names {absent[0]}{more}, which {source.images} does not have")

        def read(name: str) -> tuple[str, bytes]:
            entry = present[name]
            if archive is not None and entry is not None:
                data = read_entry(archive, source.images, entry, MOST_BYTES)
                return f"{source.images}, entry {entry.filename!r}", data
            file = source.images / name
            return str(file), read_bytes(file, MOST_BYTES, DataError)

        yield read


def _pixels(where: str, data: bytes, size: int) -> UInt8[np.ndarray, "size size 3"]:
    from PIL import Image, UnidentifiedImageError

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)  # the second where warnings are errors
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"{where}: expected at most {MOST_PIXELS:,} pixels, got {image.width} x {image.height}")
            return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC))
    except UnidentifiedImageError as error:
        raise DataError(f"{where}: expected a JPEG image, got something else") from error
    except bombs as error:
        raise DataError(f"{where}: expected at most {MOST_PIXELS:,} pixels, got far more") from error
    except (OSError, ValueError, SyntaxError, Warning) as error:  # a warning where warnings are errors
        raise DataError(f"{where}: damaged JPEG: {error}") from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
