"""Checks of a dataset's files: all present, readable to the last byte, with the expected counts and checksums.

A readable file whose checksum or counts differ from the official one is reported as different, not as a fault.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from retreever.data.cache import CHUNK
from retreever.data.catalogue import DATASETS, Dataset, Name, find_data, places_of
from retreever.data.unpack import LARGEST
from retreever.errors import DataError, RetreeverError
from retreever.files import open_regular

OFFICIAL, OTHER = "as the official files have it", "differs from the official files"


@dataclass(frozen=True)
class Report:
    """Result of a check: lines of text, the folder first, and the fault, empty if none."""

    name: Name
    lines: tuple[str, ...]
    fault: str = ""


def check(name: Name, root: str | Path | None = None) -> Report:
    """Check one dataset; faults are reported, not raised."""
    lines: list[str] = []
    try:
        place = find_data(name, root)
        lines.append(str(place))
        lines.extend(_CHECKS[name](place))
        lines.extend(_checksums(DATASETS[name], place))
    except (RetreeverError, OSError) as error:
        return Report(name, tuple(lines), str(error))
    return Report(name, tuple(lines))


def _emnist(folder: Path) -> Iterator[str]:
    from retreever.tasks.images import CLASSES, DIGITS, Part, read_emnist

    expected: dict[Part, int] = {"train": 2_400, "test": 400}
    for part, per_class in expected.items():
        _, images, labels = read_emnist(folder, part)
        counts = labels.bincount(minlength=CLASSES)
        digits = int(counts[:DIGITS].sum())
        whole = bool((counts == per_class).all())
        count, height, width = images.shape
        yield (
            f"{part}: {count:,} images of {height} x {width}, {int((counts > 0).sum())} classes, "
            f"{digits:,} digits and {count - digits:,} others: {OFFICIAL if whole else OTHER}"
        )


def _celeba(folder: Path) -> Iterator[str]:
    """Reads every image and decodes the first of each part; all are decoded when the cache is made."""
    from retreever.data.celeba_files import PARTS, decode, find_celeba, read_partition, reader

    source = find_celeba(folder)
    names, ends = read_partition(source.partition)
    starts = (0, *ends[:2])
    with reader(source, names) as read:
        size = sum(len(read(name)[1]) for name in names)
    first = next(decode(source, [names[start] for start in starts], 32))
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    counts = ", ".join(f"{size:,} {part}" for size, part in zip(sizes, PARTS, strict=True))
    verdict = OFFICIAL if sizes == [162_770, 19_867, 19_962] else OTHER
    yield f"{len(names):,} images in {source.images.name}, {counts}: {verdict}"
    yield f"all read, {size:,} bytes; {len(first)} decoded"


def _person_activity(place: Path) -> Iterator[str]:
    from retreever.data.activity_file import NO_CLASS, find_file, read_rows, recordings_of
    from retreever.tasks.activity import windows_of

    rows = read_rows(find_file(place))
    windows = len(windows_of(recordings_of(rows)).time)
    classes = len(set(rows.label.tolist()) - {NO_CLASS})
    counts = f"{len(rows.ticks):,} rows, {len(rows.names)} recordings, {classes} classes"
    verdict = OFFICIAL if (len(rows.ticks), len(rows.names)) == (164_860, 25) else OTHER
    yield f"{counts}, {windows:,} windows: {verdict}"


_CHECKS: dict[Name, Callable[[Path], Iterator[str]]] = {
    "emnist": _emnist,
    "celeba": _celeba,
    "person_activity": _person_activity,
}


def _checksums(dataset: Dataset, place: Path) -> Iterator[str]:
    """Compares checksums of the (unpacked) files with the official ones, where those are known."""
    if not dataset.md5:
        yield "checksums: those of the official files are not known"
    for name, md5 in dataset.md5:
        file = place if place.is_file() else next((f for f in places_of(place, name) if f.is_file()), None)
        if file is not None:
            yield f"{file.name}: md5 {OFFICIAL if _unpacked_md5(file) == md5 else OTHER}"


def _unpacked_md5(file: Path) -> str:
    found = hashlib.md5(usedforsecurity=False)
    size = 0
    with open_regular(file, LARGEST, DataError) as packed:
        stream = gzip.GzipFile(fileobj=packed) if file.suffix == ".gz" else packed
        try:
            while piece := stream.read(CHUNK):
                found.update(piece)
                size += len(piece)
                if size > LARGEST:
                    raise DataError(f"{file}: expected at most {LARGEST:,} bytes unpacked, got more")
        except (EOFError, zlib.error) as error:
            raise DataError(f"{file}: gzip data are truncated or damaged: {error}") from error
    return found.hexdigest()
