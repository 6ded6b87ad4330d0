"""Atomic writing of files: written beside the target, synced to disk, then moved into its place."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from retreever.errors import RetreeverError


@contextmanager
def os_errors(path: str | Path, problem: str, error: type[RetreeverError] = RetreeverError) -> Iterator[None]:
    """Turn an `OSError` raised inside into `error`, one line: path, `problem` ("cannot be written") and reason."""
    try:
        yield
    except OSError as cause:
        raise error(f"{path}: {problem}: {cause.strerror or cause}") from cause


@contextmanager
def open_regular(
    file: str | Path, largest: int, error: type[RetreeverError] = RetreeverError
) -> Iterator[BufferedReader]:
    """Open a regular file of at most `largest` bytes for reading; pipes and devices are refused without waiting."""
    with os_errors(file, "cannot be read", error), open(file, "rb", opener=regular_only) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise error(f"{file}: expected at most {largest:,} bytes, got {size:,}")
        yield stream


def read_bytes(file: str | Path, largest: int, error: type[RetreeverError] = RetreeverError) -> bytes:
    """All bytes of a regular file that has at most `largest` of them."""
    with open_regular(file, largest, error) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(size + 1)
    if len(data) > size:  # it grew, or is one of the kernel's, which claim to be empty
        raise error(f"{file}: expected {size:,} bytes, its size, got more")
    return data


def regular_only(path: str, flags: int) -> int:
    """Opener for `open`: raises `OSError` for pipes, devices and sockets, and for a symbolic link to be written to."""
    no_link = getattr(os, "O_NOFOLLOW", 0) if flags & (os.O_WRONLY | os.O_RDWR) else 0
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | no_link, 0o666)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `open` itself refuses folders
        os.close(handle)
        raise OSError(errno.EINVAL, "expected a regular file, got a pipe, device or socket")
    return handle


def write_bytes(file: str | Path, data: bytes, error: type[RetreeverError] = RetreeverError) -> Path:
    """Write the file atomically, making missing folders; a failure raises `error` and leaves the file as it was."""
    return write_chunks(file, (data,), error)


def write_chunks(file: str | Path, chunks: Iterable[bytes], error: type[RetreeverError] = RetreeverError) -> Path:
    """`write_bytes` for data that come a chunk at a time, and need not fit into memory."""
    target = Path(file)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with os_errors(target, "cannot be written", error):
        make_folder(target.parent)
        try:
            write_synced(draft, chunks)
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    return target


def write_text(file: str | Path, text: str, error: type[RetreeverError] = RetreeverError) -> Path:
    """`write_bytes` for text, in UTF-8; half a surrogate pair, which JSON may hold, is written as its escape."""
    return write_bytes(file, text.encode(errors="backslashreplace"), error)


def write_synced(file: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a new file and wait until the disk has it; an existing one is refused. Raises `OSError`."""
    with open(file, "xb") as stream:
        stream.writelines((data,) if isinstance(data, bytes) else data)
        stream.flush()
        os.fsync(stream.fileno())


def make_folder(folder: Path) -> None:
    """Create the folder and those above it where missing, and wait until the disk has them. Raises `OSError`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if missing:  # a file in its place raises an error when something is written below it
        folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in the folder; Windows offers no such thing. Raises `OSError`."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
