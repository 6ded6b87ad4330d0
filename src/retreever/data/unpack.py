"""Unpacks zip archives from elsewhere without trusting them.

Refused, naming the entry: paths that lead out of the folder, links and other things that are no files, two entries of
one name, and bombs (more data than any of the datasets has, or more than deflate can honestly pack so small). Files
are unpacked beside their place and moved there once all of them are whole, so that nothing is ever half-written.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath

from retreever.errors import DataError
from retreever.files import make_folder, open_regular, os_errors, sync_folder

LARGEST = 4 * 2**30  # bytes, packed and unpacked; the largest official archive has 1.5 GB
DIRECTORY = 2**25  # bytes of the table of contents, CelebA's has 20 MB; in memory it takes ten times as much
RATIO = 1_100  # deflate cannot pack better than 1,032 to 1
CHUNK = 2**20
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # encrypted
    NotImplementedError,
    ValueError,  # names that are no UTF-8
    OverflowError,
    struct.error,
)


def unpack(archive: str | Path, folder: str | Path, wanted: Collection[str]) -> list[Path]:
    """Put the entries whose file name is `wanted` into `folder`, without the folders they lie in.

    Every wanted name must be there. Files of the same name in `folder` are replaced.
    """
    path, target = Path(archive), Path(folder)
    with open_zip(path) as source:
        entries = by_name(safe_entries(source, path), path, wanted)
        missing = sorted(set(wanted) - set(entries))
        if missing:
            raise DataError(f"{path}: expected an entry {missing[0]}, found none")
        with os_errors(target, "cannot be written", DataError):
            make_folder(target)
            draft = Path(tempfile.mkdtemp(prefix=".unpack-", suffix=".tmp", dir=target))
            try:
                for name, entry in entries.items():
                    _extract(source, path, entry, draft / name)
                for name in entries:
                    os.replace(draft / name, target / name)
                sync_folder(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return [target / name for name in entries]


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; what is none raises `DataError`."""
    with open_regular(path, LARGEST, DataError) as stream, _Archive(stream.raw) as archive:
        try:
            source = zipfile.ZipFile(archive)
        except DAMAGED as error:
            raise DataError(f"{path}: expected a zip archive, got {error}") from error
        with source:
            yield source


class _Archive(BufferedReader):
    """zipfile reads the table of contents at once, however long the archive says it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > DIRECTORY:
            raise zipfile.BadZipFile(f"a table of contents of {size:,} bytes, more than the {DIRECTORY:,} allowed")
        return super().read(size)


def safe_entries(source: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The files in the archive, once all its entries are found harmless and no two have the same name."""
    seen: set[str] = set()
    files, total = [], 0
    for entry in source.infolist():
        problem = _problem(entry)
        key = entry.filename.rstrip("/").casefold()  # some disks take A and a for the same
        if key in seen:
            problem = "comes twice"
        total += entry.file_size
        if total > LARGEST:
            problem = f"brings the archive to {total:,} bytes, more than the {LARGEST:,} allowed"
        if problem:
            raise DataError(f"{path}, entry {entry.filename!r}: refused, it {problem}")
        seen.add(key)
        if not entry.is_dir():
            files.append(entry)
    return files


def by_name(entries: Iterable[zipfile.ZipInfo], path: Path, wanted: Collection[str]) -> dict[str, zipfile.ZipInfo]:
    """The wanted entries by their file names, whatever folder of the archive each lies in."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = PurePosixPath(entry.filename).name
        if name in wanted:
            if name in found:
                raise DataError(
                    f"{path}, entry {entry.filename!r}: expected {name} once, got {found[name].filename!r} too"
                )
            found[name] = entry
    return found


def read_entry(source: zipfile.ZipFile, path: Path, entry: zipfile.ZipInfo, largest: int) -> bytes:
    """Contents of one entry of at most `largest` bytes, checked against their checksum."""
    size = entry.file_size
    if size > largest:
        raise DataError(f"{path}, entry {entry.filename!r}: expected at most {largest:,} bytes, got {size:,}")
    return b"".join(_pieces(source, path, entry))


def _extract(source: zipfile.ZipFile, path: Path, entry: zipfile.ZipInfo, file: Path) -> None:
    with open(file, "xb") as stream:
        stream.writelines(_pieces(source, path, entry))
        stream.flush()
        os.fsync(stream.fileno())


def _pieces(source: zipfile.ZipFile, path: Path, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """As many bytes as the entry promises and no more: zipfile stops there and compares checksums.

    Asked for all at once, it would unpack everything and then cut it.
    """
    try:
        with source.open(entry) as packed:
            while piece := packed.read(CHUNK):
                yield piece
    except DAMAGED as error:
        raise DataError(f"{path}, entry {entry.filename!r}: damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{path}, entry {entry.filename!r}: cannot be read: {error.strerror or error}") from error


def _problem(entry: zipfile.ZipInfo) -> str:
    """What is wrong with an entry; nothing when it is harmless."""
    name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    parts = name.replace("\\", "/").split("/")
    if not name or name.startswith(("/", "\\")) or ":" in parts[0] or "\0" in entry.orig_filename:
        return "has an absolute or impossible path"
    if ".." in parts:
        return "leads out of its folder"
    if kind and kind not in (stat.S_IFREG, stat.S_IFDIR):
        return "is a link or another thing that is no file"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # of others zipfile unpacks any amount
        return f"is packed by method {entry.compress_type}; expected 0 (stored) or 8 (deflated)"
    if entry.file_size > RATIO * max(1, entry.compress_size):
        return f"claims {entry.file_size:,} bytes packed into {entry.compress_size:,}"
    return ""
