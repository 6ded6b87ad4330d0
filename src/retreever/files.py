"""Files that are whole or absent: written beside the target, forced to disk, then put in its place in one step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retreever.errors import RetreeverError


@contextmanager
def os_errors(path: str | Path, problem: str, error: type[RetreeverError] = RetreeverError) -> Iterator[None]:
    """Turn an `OSError` from inside into one line: the path, the problem ("cannot be written") and the reason."""
    try:
        yield
    except OSError as cause:
        raise error(f"{path}: {problem}: {cause.strerror or cause}") from cause


def write_bytes(file: str | Path, data: bytes, error: type[RetreeverError] = RetreeverError) -> Path:
    """Write the file in one step, folders on the way included; a failure raises `error` and changes nothing."""
    target = Path(file)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with os_errors(target, "cannot be written", error):
        make_folder(target.parent)
        try:
            write_synced(draft, data)
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    return target


def write_text(file: str | Path, text: str, error: type[RetreeverError] = RetreeverError) -> Path:
    """`write_bytes` for text, in UTF-8."""
    return write_bytes(file, text.encode(), error)


def write_synced(file: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it; an existing one is refused. Raises `OSError`."""
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def make_folder(folder: Path) -> None:
    """Create the folder and those above it where missing, and wait until the disk has them. Raises `OSError`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if missing:  # a file in its place shows when something is written below it
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
