"""Gets official archives, in pieces if need be: what a broken connection left is gone on with, not begun again."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

from retreever.data.cache import alone, digest
from retreever.data.catalogue import DATASETS, Dataset, Name, data_root, files_of
from retreever.data.connection import Watch, open_address, pieces
from retreever.data.unpack import unpack
from retreever.errors import DataError
from retreever.files import make_folder, os_errors, regular_only

LARGEST = 4 * 2**30  # bytes; the largest official archive has 0.6 GB


def fetch(name: Name, root: str | Path | None = None) -> list[Path]:
    """Get a dataset's files into its folder under the data root; those that are there already stay as they are."""
    dataset = DATASETS[name]
    folder = data_root(root) / name
    if not all(files_of(dataset, folder).values()):
        if not dataset.address:
            raise DataError(f"{name}: cannot be fetched by a program; {dataset.advice} and put them into {folder}")
        with os_errors(folder, "cannot be written", DataError):
            make_folder(folder)
            with alone(folder / name):
                if not all(files_of(dataset, folder).values()):  # another process may have fetched them meanwhile
                    _fetch(dataset, folder)
    return [path for path in files_of(dataset, folder).values() if path]


def _fetch(dataset: Dataset, folder: Path) -> None:
    archive = download(dataset.address, folder / f".{dataset.name}.zip", dataset.archive_md5)
    try:
        packed = dataset.name == "emnist"  # its files are gzipped one by one inside the archive, and stay so
        unpack(archive, folder, [f"{file}.gz" if packed else file for file in dataset.files])
    finally:
        archive.unlink(missing_ok=True)  # a damaged one would be found damaged again


def download(address: str, file: Path, md5: str = "") -> Path:
    """Get `address` into `file`, going on with <file>.part where an earlier try ended.

    Raises `DataError` in one line when there is no connection, no such file, or the wrong checksum.
    """
    part = file.with_name(f"{file.name}.part")
    with os_errors(part, "cannot be written", DataError):
        make_folder(file.parent)
        if part.is_symlink():
            raise DataError(f"{part}: expected a file of an earlier try or none, got a symbolic link; remove it")
        done = part.stat().st_size if part.exists() else 0
        total = _get(address, part, done)
        size = part.stat().st_size
        if total is not None and size < total:
            raise DataError(f"{address}: got {size:,} of {total:,} bytes; run it again to go on from there")
        if md5 and digest(part, "md5") != md5:
            part.unlink()
            raise DataError(f"{address}: expected a file with md5 {md5}, got another; removed, run it again")
        part.replace(file)
    return file


def _get(address: str, part: Path, done: int) -> int | None:
    """Append what is missing; the size of the whole, where the server says it."""
    headers = {"User-Agent": "retreever", **({"Range": f"bytes={done}-"} if done else {})}
    with Watch() as watch:
        try:
            answer = open_address(address, headers, watch)
        except HTTPError as error:
            with error:
                if error.code == 416 and done:  # nothing after what is there: whole, or of another file
                    return _whole(error, part, done, address)
            raise DataError(f"{address}: the server answered {error.code} {error.reason}") from error
        with answer:
            start, total = _extent(answer, done)
            with open(part, "ab" if start else "wb", opener=regular_only) as stream:
                stream.writelines(_told(pieces(answer, address, watch), address, start, total))
    return total


def _extent(answer: HTTPResponse, done: int) -> tuple[int, int | None]:
    """Where the answer starts, and the size of the whole: a server may ignore that only the rest was asked for."""
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", answer.headers.get("Content-Range", ""))
    if answer.status == 206 and found and int(found[1]) == done:
        return done, None if found[2] == "*" else int(found[2])
    if answer.status == 206:
        raise DataError(f"{answer.url}: asked for bytes from {done}, the server sent others")
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


def _told(pieces: Iterable[bytes], address: str, done: int, total: int | None) -> Iterator[bytes]:
    """The pieces; prints the progress every two seconds."""
    told = time.monotonic()
    for piece in pieces:
        yield piece
        done += len(piece)
        if done > LARGEST:
            raise DataError(f"{address}: expected at most {LARGEST:,} bytes, more are coming")
        if time.monotonic() - told > 2:
            told = time.monotonic()
            of = f" of {total / 1e6:,.0f}" if total else ""
            print(f"{address}: {done / 1e6:,.0f}{of} MB", file=sys.stderr, flush=True)


def _whole(error: HTTPError, part: Path, done: int, address: str) -> int:
    found = re.fullmatch(r"bytes \*/(\d{1,18})", error.headers.get("Content-Range", ""))
    if found and int(found[1]) == done:
        return done
    part.unlink()
    raise DataError(f"{address}: what an earlier try left does not fit; removed, run it again") from error
