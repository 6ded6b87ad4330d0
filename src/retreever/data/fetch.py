"""Gets official archives, in pieces if need be: what a broken connection left is gone on with, not begun again."""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError

from retreever.data.cache import digest
from retreever.data.catalogue import DATASETS, Dataset, Name, data_root, files_of
from retreever.data.unpack import unpack
from retreever.errors import DataError
from retreever.files import make_folder, os_errors

TIMEOUT = 30.0  # seconds of silence
CHUNK = 2**18
LARGEST = 4 * 2**30  # bytes; the largest official archive has 0.6 GB


def fetch(name: Name, root: str | Path | None = None) -> list[Path]:
    """Get a dataset's files into its folder under the data root; those that are there already stay as they are."""
    dataset = DATASETS[name]
    folder = data_root(root) / name
    present = files_of(dataset, folder)
    if all(present.values()):
        return [path for path in present.values() if path]
    if not dataset.address:
        raise DataError(f"{name}: cannot be fetched by a program; {dataset.advice} and put them into {folder}")
    archive = download(dataset.address, folder / f".{name}.zip", dataset.archive_md5)
    try:
        unpacked = unpack(archive, folder, _entries(dataset))
    finally:
        archive.unlink(missing_ok=True)  # a damaged one would be found damaged again
    return unpacked


def download(address: str, file: Path, md5: str = "") -> Path:
    """Get `address` into `file`, going on with <file>.part where an earlier try ended.

    Raises `DataError` in one line when there is no connection, no such file, or the wrong checksum.
    """
    part = file.with_name(f"{file.name}.part")
    with os_errors(part, "cannot be written", DataError):
        make_folder(file.parent)
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
    try:
        with _connection(address):
            answer = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code == 416 and done:  # nothing after what is there: whole, or of another file
            return _whole(error, part, done, address)
        raise DataError(f"{address}: the server answered {error.code} {error.reason}") from error
    with answer:
        start, total = _extent(answer, done)
        with open(part, "ab" if start else "wb") as stream:
            for piece in _pieces(answer, address, start, total):
                stream.write(piece)
    return total


@contextmanager
def _connection(address: str) -> Iterator[None]:
    """Trouble with the network as one line."""
    try:
        yield
    except HTTPError:
        raise
    except (OSError, HTTPException) as error:  # time-outs, refusals, unknown hosts, answers cut short
        reason = error.reason if isinstance(error, URLError) else error
        problem = "no answer in time" if isinstance(reason, TimeoutError) else reason or type(error).__name__
        raise DataError(f"{address}: cannot be reached: {problem}; run it again to go on with what came") from error


def _extent(answer: HTTPResponse, done: int) -> tuple[int, int | None]:
    """Where the answer starts, and the size of the whole: a server may ignore that only the rest was asked for."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
    if answer.status == 206 and found and int(found[1]) == done:
        return done, None if found[2] == "*" else int(found[2])
    if answer.status == 206:
        raise DataError(f"{answer.url}: asked for bytes from {done}, the server sent others")
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _pieces(answer: HTTPResponse, address: str, done: int, total: int | None) -> Iterator[bytes]:
    """What comes, and every two seconds a line on how much."""
    told = time.monotonic()
    while True:
        with _connection(address):
            piece = answer.read(CHUNK)
        if not piece:
            return
        yield piece
        done += len(piece)
        if done > LARGEST:
            raise DataError(f"{address}: expected at most {LARGEST:,} bytes, more are coming")
        if time.monotonic() - told > 2:
            told = time.monotonic()
            of = f" of {total / 1e6:,.0f}" if total else ""
            print(f"{address}: {done / 1e6:,.0f}{of} MB", file=sys.stderr, flush=True)


def _whole(error: HTTPError, part: Path, done: int, address: str) -> int:
    found = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
    if found and int(found[1]) == done:
        return done
    part.unlink()
    raise DataError(f"{address}: what an earlier try left does not fit; removed, run it again") from error


def _entries(dataset: Dataset) -> list[str]:
    """EMNIST's files are gzipped one by one inside the archive, and stay so."""
    return [f"{file}.gz" if dataset.name == "emnist" else file for file in dataset.files]
