"""The official text file of UCI's "Localization Data for Person Activity": rows, recordings, time points, labels.

Rows are `recording,tag,timestamp,date,x,y,z,label`; timestamps count 100 ns. The public code behind the published
numbers divides them by 1e5, so that time points are 10 ms apart, and merges rows that follow each other at the same
one. It also spells one label "standing up from sit on grnd", which the file never does: the file's "standing up from
sitting on the ground" matches nothing, leaves eleven zeros, and their argmax is class 0, "walking". That is kept here,
as the published accuracies were measured against it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from retreever.errors import DataError
from retreever.files import open_regular

FILE = "ConfLongDemo_JSI.txt"
COLUMNS = ("recording", "tag", "timestamp", "date", "x", "y", "z", "label")
TAGS = ("010-000-024-033", "010-000-030-096", "020-000-033-111", "020-000-032-221")  # ankles left, right; chest; belt
CHANNELS = 3 * len(TAGS)
CLASSES = 11  # of which the merged labels use the first seven
NO_CLASS = -1
LABELS = {
    "walking": 0,
    "falling": 1,
    "lying": 2,
    "lying down": 2,
    "sitting": 3,
    "sitting down": 3,
    "standing up from lying": 4,
    "standing up from sitting": 4,
    "standing up from sit on grnd": 4,
    "on all fours": 5,
    "sitting on the ground": 6,
    "standing up from sitting on the ground": NO_CLASS,
}
TICKS_PER_STEP = 1e5  # 10 ms
LARGEST = 2**26  # bytes, packed and unpacked; the official 164,860 rows have 16 MB
BEYOND = 1e19  # no number reaches it: the steps of larger timestamps fit into no int64
LONGEST = 1_000  # characters of a line; the official ones have at most 161
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError)


class Rows(NamedTuple):
    """The file as it stands, one entry per row; recordings, tags and labels by number."""

    names: list[str]
    recording: Int64[np.ndarray, " n"]
    tag: Int64[np.ndarray, " n"]
    ticks: Float64[np.ndarray, " n"]
    position: Float64[np.ndarray, "n 3"]
    label: Int64[np.ndarray, " n"]


class Recording(NamedTuple):
    """One person doing one round of activities: t time points, in the order of the file."""

    name: str
    time: Int64[np.ndarray, " t"]
    values: Float32[np.ndarray, "t 12"]
    mask: Float32[np.ndarray, "t 12"]
    labels: Bool[np.ndarray, "t 11"]


def find_file(path: str | Path) -> Path:
    """The data file: `path` itself, or what lies in the folder `path` under the official name, plain or gzipped."""
    given = Path(path)
    if given.is_file():
        return given
    folders = (given, given / "person_activity")
    places = [folder / name for folder in folders for name in (FILE, f"{FILE}.gz")] if given.is_dir() else [given]
    for place in places:
        if place.is_file():
            return place
    raise DataError(f"{FILE} is absent; looked for {', '.join(map(str, places))}")


def read_rows(file: Path) -> Rows:
    """Read and check every row; a fault raises `DataError` naming file and line."""
    numbers: dict[str, int] = {}
    tags = {tag: number for number, tag in enumerate(TAGS)}
    codes, reals, last = [], [], None
    for line, row in enumerate(_lines(file), start=1):
        parts = row.strip().split(",")
        if len(parts) != len(COLUMNS):
            _fault(file, line, f"{len(COLUMNS)} columns ({','.join(COLUMNS)})", f"{len(parts)}")
        name, tag, ticks, _, x, y, z, label = parts
        if name != last:
            if not name or name in numbers:
                _fault(file, line, "the rows of a recording together, under a name", repr(name))
            numbers[name], last = len(numbers), name
        if tag not in tags:
            _fault(file, line, f"a tag of {', '.join(TAGS)}", repr(tag))
        if label not in LABELS:
            _fault(file, line, "one of the known activities", repr(label))
        codes.append((numbers[name], tags[tag], LABELS[label]))
        try:
            reals.append((float(ticks), float(x), float(y), float(z)))
        except ValueError:
            _fault(file, line, "numbers for timestamp, x, y, z", repr(",".join((ticks, x, y, z))))
    if not codes:
        raise DataError(f"{file}: expected rows of {','.join(COLUMNS)}, got an empty file")
    code, real = np.array(codes, dtype=np.int64), np.array(reals, dtype=np.float64)
    bad = np.flatnonzero(~(np.abs(real) < BEYOND).all(axis=1))  # NaN too
    if len(bad):
        values = ", ".join(map(str, reals[bad[0]]))
        _fault(file, int(bad[0]) + 1, f"finite timestamp, x, y, z, below {BEYOND:g}", values)
    return Rows(list(numbers), code[:, 0], code[:, 1], real[:, 0], real[:, 1:], code[:, 2])


def recordings_of(rows: Rows) -> list[Recording]:
    """Quantise time per recording and merge rows that follow each other at the same time point."""
    first = np.flatnonzero(np.diff(rows.recording, prepend=-1))  # rows of a recording stand together
    step = np.rint((rows.ticks - rows.ticks[first][rows.recording]) / TICKS_PER_STEP).astype(np.int64)
    opens = np.diff(rows.recording, prepend=-1) != 0
    opens[1:] |= np.diff(step) != 0
    point = np.cumsum(opens) - 1
    total = int(point[-1]) + 1
    sums, counts = np.zeros((total, len(TAGS), 3)), np.zeros((total, len(TAGS), 1))
    np.add.at(sums, (point, rows.tag), rows.position)
    np.add.at(counts, (point, rows.tag), 1.0)
    values = (sums / np.maximum(counts, 1)).astype(np.float32).reshape(total, CHANNELS)
    mask = np.repeat((counts > 0).astype(np.float32), 3, axis=2).reshape(total, CHANNELS)
    labels, named = np.zeros((total, CLASSES), dtype=bool), rows.label != NO_CLASS
    labels[point[named], rows.label[named]] = True
    time, ends = step[opens], [*point[first[1:]], total]
    spans = [slice(int(start), int(end)) for start, end in zip(point[first], ends, strict=True)]
    return [Recording(n, time[s], values[s], mask[s], labels[s]) for n, s in zip(rows.names, spans, strict=True)]


def _lines(file: Path) -> Iterator[str]:
    """Lines of the file, gzipped when its name says so; damage shows as `DataError` after the last good line."""
    done = size = 0
    with open_regular(file, LARGEST, DataError) as packed:
        try:
            stream = TextIOWrapper(gzip.GzipFile(fileobj=packed) if file.suffix == ".gz" else packed, encoding="utf-8")
            while line := stream.readline(LONGEST + 1):
                size += len(line)
                if len(line) > LONGEST:
                    _fault(file, done + 1, f"at most {LONGEST:,} characters", "more")
                if size > LARGEST:
                    _fault(file, done + 1, f"the file to end within {LARGEST:,} characters", "more")
                yield line
                done += 1
        except DAMAGED as error:
            raise DataError(f"{file}: damaged after line {done}: {error}") from error


def _fault(file: Path, line: int, expected: str, got: str) -> NoReturn:
    raise DataError(f"{file}, line {line}: expected {expected}, got {got}")
