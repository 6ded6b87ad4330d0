"""Ways to spoil files: bytes, JSON, tensors, and things that are no files. All choices come from the given `Random`."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

SPECIAL = ("pipe", "folder", "link to /dev/zero", "link to /dev/full", "link to nothing", "missing")
Files = dict[str, bytes | str]  # contents by path, or one of SPECIAL
Edit = Callable[[Random, Files], str]  # changes the files in place and says what it did

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
STRANGE = ("", "x", "\x1b[31mred\n\r\x07", "\u202eleft", "../../../tmp/out", "cuda", "0", "-1", "nan", "x" * 5_000)
VALUES: tuple[Any, ...] = (
    *NUMBERS, -(2**63), 10**30, 10**400, 3, 4, 5, 7, 12_000, 10**6, 10**7, 10**9, 0.5, -0.5, 1e308, 1e-308, -0.0,
    None, True, False, [], {}, [[]], [0], [1, 2], [-1], [2**63], {"a": 1}, *STRANGE,
)  # fmt: skip
EXTREME = (0, -1, 2**31, 2**63, 10**30, 10**400, 1e308, math.nan, math.inf, "x" * 5_000, "\ud800", "\x1b[31m", [], {})
RAW = (
    "1e400", "-1e400", "NaN", "Infinity", "9" * 5_000, "[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 50_000,
    "[" * 5_000 + "]" * 5_000, '"' + "x" * 300_000 + '"', '"\\ud800"', '"\\u0000"', '{"a": 1, "a": 2}', "", "nul",
)  # fmt: skip
MARK = "\uf8ffraw\uf8ff"  # stands where RAW text goes; nothing else has it


def spoil_bytes(random: Random, data: bytes) -> tuple[bytes, str]:
    """One to three small changes at random places."""
    notes = []
    for _ in range(random.choice((1, 1, 2, 3))):
        change = random.choice(BYTE_CHANGES)
        at = random.randrange(len(data)) if data else 0
        data = change(random, data, at)
        notes.append(f"{change.__name__.strip('_')} at {at}")
    return data, ", ".join(notes)


def _flip(random: Random, data: bytes, at: int) -> bytes:
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _set(random: Random, data: bytes, at: int) -> bytes:
    return data[:at] + bytes([random.choice((0, 0x0A, 0x22, 0x2C, 0x7F, 0x80, 0xFF))]) + data[at + 1 :]


def _insert(random: Random, data: bytes, at: int) -> bytes:
    return data[:at] + random.randbytes(random.choice((1, 2, 4, 100, 3_000))) + data[at:]


def _delete(random: Random, data: bytes, at: int) -> bytes:
    return data[:at] + data[at + random.choice((1, 2, 4, 100, 3_000)) :]


def _repeat(random: Random, data: bytes, at: int) -> bytes:
    piece = data[at : at + random.choice((1, 4, 64, 1_000))]
    return data[:at] + piece * random.choice((2, 3, 20)) + data[at + len(piece) :]


def _truncate(random: Random, data: bytes, at: int) -> bytes:
    return data[: random.choice((at, at, len(data) - 1, 8, 4, 1, 0))]


def _splice(random: Random, data: bytes, at: int) -> bytes:
    source, size = random.randrange(len(data) or 1), random.choice((1, 8, 64, 1_000))
    return data[:at] + data[source : source + size] + data[at + size :]


def _number(random: Random, data: bytes, at: int) -> bytes:
    """What a length or an offset might be, near the start as often as anywhere."""
    size = random.choice((1, 2, 4, 8))
    place = at if random.random() < 0.5 else min(at, random.randrange(64))
    number = (random.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, random.choice(("little", "big")))
    return data[:place] + number + data[place + size :]


BYTE_CHANGES = (_flip, _flip, _set, _insert, _delete, _repeat, _truncate, _splice, _number, _number)


def spoil_json(random: Random, value: Any) -> tuple[bytes, str]:
    """The JSON text of `value` with one or two entries changed, removed, renamed or added."""
    value, notes, raw = copy.deepcopy(value), [], random.choice(RAW)
    for _ in range(random.choice((1, 1, 1, 2))):
        parent, key = random.choice(_places(value))
        if parent is None:
            value = random.choice((MARK, random.choice(VALUES)))
            notes.append("all of it")
        else:
            notes.append(f"{_change_entry(random, parent, key)} {key!r}")
    text = json.dumps(value).replace(json.dumps(MARK), raw).replace(json.dumps(MARK)[1:-1], "raw")
    return text.encode("utf-8", "surrogatepass"), ", ".join(notes)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in `value`; (None, None) is the whole."""
    found: list[tuple[Any, Any]] = [(None, None)]
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else []
        found += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys]
    return found


def _change_entry(random: Random, parent: Any, key: Any) -> str:
    change = random.choice(("value", "value", "near", "near", "extreme", "raw", "remove", "rename", "add", "swap"))
    if change == "value":
        parent[key] = random.choice(VALUES)
    elif change == "near":
        parent[key] = _near(random, parent[key])
    elif change == "extreme":
        parent[key] = random.choice(EXTREME)
    elif change == "raw":
        parent[key] = MARK
    elif change == "remove":
        del parent[key]
    elif change == "swap":
        other = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif isinstance(parent, list):
        parent.append(random.choice(VALUES))
    else:
        name = random.choice((*STRANGE, MARK, f"{key}2"))
        parent[name] = parent.pop(key) if change == "rename" else random.choice(VALUES)
    return change


def _near(random: Random, value: Any) -> Any:
    """Something like `value`: of the neighbouring size, of another type, twice."""
    if isinstance(value, int | float):
        return random.choice(
            (value + 1, value - 1, value * 2, -value, value * 1_000, float(value), str(value), [value])
        )
    if isinstance(value, str):
        return random.choice((value + "x", value[:-1], value.upper(), [value], value * 500, value + "\n\x1b[2J", 1))
    if isinstance(value, list):
        return random.choice((value * 2, value[:-1], value[::-1], [*value, *value[:1] * 2_000], {"a": value}))
    return [value]


def bytes_of(*names: str) -> Edit:
    """Spoil the bytes of one of the files."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        files[name], note = spoil_bytes(random, content(files, name))
        return f"{name}: bytes: {note}"

    return edit


def json_of(*names: str) -> Edit:
    """Spoil the entries of one of the JSON files."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        files[name], note = spoil_json(random, json.loads(content(files, name)))
        return f"{name}: JSON: {note}"

    return edit


def special_of(*names: str) -> Edit:
    """Put a pipe, a folder, a link or nothing in place of one of the files."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        files[name] = random.choice(SPECIAL)
        return f"{name}: {files[name]!r}"

    return edit


def content(files: Files, name: str) -> bytes:
    """The bytes of a file that no edit has replaced by something special."""
    data = files[name]
    assert isinstance(data, bytes)
    return data


def write_files(folder: Path, files: Files) -> None:
    """Put the files into `folder`."""
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            place.write_bytes(data)
        elif data == "pipe":
            os.mkfifo(place)
        elif data == "folder":
            place.mkdir()
        elif data != "missing":
            place.symlink_to("absent" if data == "link to nothing" else data.removeprefix("link to "))


def read_files(folder: Path) -> Files:
    """All files below `folder`."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
