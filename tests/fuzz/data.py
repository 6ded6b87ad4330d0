"""Targets of plain and gzipped data: idx files (EMNIST) and the rows of Human Activity."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from random import Random

from edits import Edit, Files, bytes_of, content, special_of, spoil_bytes
from runner import Target, check_message

from retreever.data.activity_file import FILE, LABELS, TAGS
from retreever.lab.data_check import check
from retreever.tasks.activity import ActivityTask
from retreever.tasks.images import EmnistTask

SIDE, COUNT = 20, 8
EMNIST = [
    f"emnist-balanced-{part}-{what}-ubyte" for part in ("train", "test") for what in ("images-idx3", "labels-idx1")
]
ROWS = f"person_activity/{FILE}"
BOMB = 30 * 2**20  # bytes of zeros
FIELDS = (
    "", " ", "nan", "inf", "-inf", "1e400", "1e308", "-1e308", "1e17", "9" * 400, "1_0", "0x10", "1,2", "-1",
    "\uff11\uff12", "\x1b[31m", "\u202e", "\0", "é", "walking", "lying down", TAGS[1], "A02", "x" * 900, "x" * 5_000,
)  # fmt: skip


def idx(base: Path) -> Target:
    """EMNIST's four files."""
    edits = [*[bytes_of(*EMNIST)] * 4, *[lengths_of(*EMNIST)] * 3, special_of(*EMNIST)]
    return Target("idx", {**idx_files()}, edits, [emnist, emnist, check_emnist])


def idx_files() -> dict[str, bytes]:
    pixels = Random(0).randbytes(COUNT * SIDE * SIDE)
    images = struct.pack(">4I", 0x803, COUNT, SIDE, SIDE) + pixels
    labels = struct.pack(">2I", 0x801, COUNT) + bytes([0, 1, 2, 3, 4, 5, 20, 46])
    return dict(zip(EMNIST, (images, labels) * 2, strict=True))


def lengths_of(*names: str) -> Edit:
    """Change one of the lengths in the header, or two so that their product stays."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        data = bytearray(content(files, name))
        count = data[3]
        sizes = list(struct.unpack_from(f">{count}I", data, 4))
        at = random.randrange(count)
        sizes[at] = random.choice((0, 1, sizes[at] * 2, sizes[at] // 2, 2**16, 2**20, 2**31, 2**32 - 1))
        if random.random() < 0.3:
            sizes[at - 1] = len(data) // max(1, sizes[at])
        struct.pack_into(f">{count}I", data, 4, *sizes)
        files[name] = bytes(data)
        return f"{name}: lengths {sizes}"

    return edit


def emnist(folder: Path) -> None:
    for classes in ("seen", "unseen"):
        task = EmnistTask(folder, classes, validation_images=2)  # type: ignore[arg-type]
        next(iter(task.validation()))
        next(iter(task.test()))
        task.sample(2, task.training(0))


def check_emnist(folder: Path) -> str | None:
    return checked("emnist", folder)


def checked(name: str, folder: Path) -> str | None:
    """`retreever data check` reports faults in one line each."""
    report = check(name, folder)  # type: ignore[arg-type]
    for line in (*report.lines, report.fault):
        check_message(line)
    return "fault" if report.fault else None


def rows(base: Path) -> Target:
    """The text file of Human Activity."""
    edits = [*[fields_of(ROWS)] * 5, *[lines_of(ROWS)] * 2, *[bytes_of(ROWS)] * 3, special_of(ROWS)]
    return Target("csv", {ROWS: activity_rows()}, edits, [activity, activity, check_activity])


def activity_rows() -> bytes:
    random, labels = Random(0), [label for label in LABELS if "grnd" not in label]
    lines = [
        f"A0{recording},{random.choice(TAGS)},{633790226051280329 + 10**6 * step},27.05.2009 14:03:25:127,"
        f"{random.uniform(1, 5):.6f},{random.uniform(0, 3):.6f},{random.uniform(0, 2):.6f},{random.choice(labels)}"
        for recording in range(5)
        for step in range(80)
    ]
    return "\n".join(lines).encode() + b"\n"


def fields_of(name: str) -> Edit:
    """Replace fields of one or more rows."""

    def edit(random: Random, files: Files) -> str:
        lines = content(files, name).decode().splitlines()
        value, column = random.choice(FIELDS), random.randrange(8)
        for at in random.sample(range(len(lines)), random.choice((1, 1, 5, 300))):
            parts = lines[at].split(",")
            parts[column] = value
            lines[at] = ",".join(parts)
        files[name] = "\n".join(lines).encode()
        return f"{name}: column {column} is {value[:20]!r}"

    return edit


def lines_of(name: str) -> Edit:
    """Reorder, drop, merge or lengthen lines."""

    def edit(random: Random, files: Files) -> str:
        lines = content(files, name).splitlines(keepends=True)
        change = random.choice(("shuffle", "few", "merge", "repeat", "long", "bom", "ends"))
        if change == "shuffle":
            random.shuffle(lines)
        elif change == "bom":
            lines.insert(0, b"\xef\xbb\xbf")
        elif change == "ends":
            lines = [line.replace(b"\n", b"\r") for line in lines]
        else:
            at = random.randrange(len(lines))
            new = {
                "few": [],
                "merge": [lines[at].rstrip()],
                "repeat": lines[at:] * 3,
                "long": [lines[at].rstrip() * 99],
            }
            lines = lines[:at] + new[change] + (lines[at + 1 :] if change != "few" else [])
        files[name] = b"".join(lines)
        return f"{name}: {change}"

    return edit


def activity(folder: Path) -> None:
    for split in ("paper", "recording"):
        task = ActivityTask(folder, split)  # type: ignore[arg-type]
        task.sample(2, task.training(0))
        next(iter(task.test()))


def check_activity(folder: Path) -> str | None:
    return checked("person_activity", folder)


def gzipped(base: Path) -> Target:
    """All of them gzipped: damage to the archive, and to what is in it."""
    plain = {**idx_files(), ROWS: activity_rows()}
    files: Files = {f"{name}.gz": gzip.compress(data, 1, mtime=0) for name, data in plain.items()}
    edits = [*[bytes_of(*files)] * 4, *[inside(*files)] * 3, *[bomb(*files)] * 2, special_of(*files)]
    return Target("gz", files, edits, [both, both, check_both])


def both(folder: Path) -> None:
    emnist(folder)
    activity(folder)


def check_both(folder: Path) -> str | None:
    return check_emnist(folder) or check_activity(folder)


def inside(*names: str) -> Edit:
    """Spoil the contents and pack them again, in one member or several."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        data, note = spoil_bytes(random, gzip.decompress(content(files, name)))
        cut = random.choice((0, len(data) // 2, len(data)))
        tail = random.choice((b"", b"\0" * 50, b"garbage"))
        files[name] = b"".join(gzip.compress(part, 1, mtime=0) for part in (data[:cut], data[cut:])) + tail
        return f"{name}: inside: {note}"

    return edit


def bomb(*names: str) -> Edit:
    """Put far more data into the archive than it has, at either end."""

    def edit(random: Random, files: Files) -> str:
        name, fill = random.choice(names), random.choice((ZEROS, LINES))
        old = content(files, name)
        files[name] = random.choice((old + fill, fill + old, fill))
        return f"{name}: {BOMB} bytes more"

    return edit


ZEROS = gzip.compress(bytes(BOMB), 1, mtime=0)
LINES = gzip.compress(b"\n" * BOMB, 1, mtime=0)
