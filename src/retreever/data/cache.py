"""Files computed once and kept under the cache root: whole and verified, or made again.

Beside every file lies a JSON with its settings, size and sha256, written last. A file without one, or one that does
not match it, is what a crash or a failing disk left: it is made anew. Processes that want the same file take turns,
so that one makes it and the others use it. Where nothing can be written, there is simply no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from retreever.data.catalogue import cache_root
from retreever.errors import RetreeverError
from retreever.files import make_folder, read_bytes, regular_only, sync_folder

CHUNK = 2**22
RECORD = 2**20  # bytes of the JSON at most


def cached_file(
    name: str, settings: Mapping[str, Any], make: Callable[[], Iterable[bytes]], root: str | Path | None = None
) -> Path | None:
    """The file of that name and settings, made from the pieces `make` gives when it is absent or damaged.

    Its contents depend on `settings` alone; other settings have another file. What `make` raises on purpose is passed
    on, and nothing is left behind. None where no file can be written.
    """
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    stem, suffix = os.path.splitext(name)
    file = cache_root(root) / f"{stem}-{key[:16]}{suffix}"
    if is_whole(file):
        return file
    try:
        make_folder(file.parent)
        with alone(file):
            if not is_whole(file):  # another process may have made it in the meantime
                _remove_drafts(file)
                _write(file, settings, make())
    except OSError as error:
        print(f"{file}: cannot be kept: {error.strerror or error}", file=sys.stderr)
        return None
    return file


def is_whole(file: Path) -> bool:
    """Whether the file is there and has the size and sha256 its JSON says."""
    try:
        expected = json.loads(read_bytes(_record(file), RECORD))
        return file.stat().st_size == expected["bytes"] and digest(file) == expected["sha256"]
    except (OSError, RetreeverError, ValueError, KeyError, TypeError, RecursionError):
        return False


def digest(file: Path, method: str = "sha256") -> str:
    """Checksum of a file's bytes, in hexadecimal. Raises `OSError`."""
    found = hashlib.new(method, usedforsecurity=False)
    with open(file, "rb", opener=regular_only) as stream:
        while piece := stream.read(CHUNK):
            found.update(piece)
    return found.hexdigest()


def _write(file: Path, settings: Mapping[str, Any], pieces: Iterable[bytes]) -> None:
    """The file, then its record; the record of an earlier file goes first."""
    _record(file).unlink(missing_ok=True)
    size, found = _replace(file, pieces)
    record = {"settings": dict(settings), "bytes": size, "sha256": found}
    _replace(_record(file), [json.dumps(record, indent=1).encode()])


def _replace(file: Path, pieces: Iterable[bytes]) -> tuple[int, str]:
    """Write the file in one step, piece by piece; its size and sha256. Raises `OSError`."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    found, size = hashlib.sha256(), 0
    try:
        with open(draft, "xb") as stream:
            for piece in pieces:
                found.update(piece)
                size += stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)
    return size, found.hexdigest()


def _record(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def _remove_drafts(file: Path) -> None:
    """Of processes that died: none is alive while the file's lock is held."""
    for draft in file.parent.glob(f".{file.name}.*.tmp"):
        with suppress(OSError):
            draft.unlink()


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Hold the lock beside `file`, waiting for it where another process has it. Without such locks nobody waits."""
    try:
        import fcntl
    except ImportError:  # Windows: each process makes a file of its own, and the last one stays
        yield
        return
    with open(file.with_name(f".{file.name}.lock"), "ab", opener=regular_only) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{file}: waiting for the process that makes it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # some network disks have no locks either
            pass
        yield
