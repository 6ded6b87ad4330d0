"""Reads idx files of bytes (the format of MNIST and EMNIST), plain or gzipped; whatever is wrong is named.

Two zero bytes, the type (8: unsigned bytes), the number of dimensions; their lengths, four bytes each, most significant
first; then the data, last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from retreever.errors import DataError
from retreever.files import open_regular

UNSIGNED_BYTES = 8
LARGEST = 2**28  # bytes of data; EMNIST's largest file that is read has a third of it
HEADER = 2**10  # bytes at most that come before the data; gzip's may hold a name
CHUNK = 2**24
Stream = gzip.GzipFile | BufferedReader


def find_idx(folder: str | Path, name: str) -> Path:
    """The file of that name in `folder`, plain or with .gz at its end."""
    plain = Path(folder) / name
    zipped = plain.with_name(f"{name}.gz")
    for file in (plain, zipped):
        if file.is_file():
            return file
    raise DataError(f"{plain}: expected this file or {zipped.name} beside it, found neither")


def read_idx(file: str | Path, dimensions: int) -> UInt8[Tensor, "*shape"]:
    """The bytes in `file` as a tensor of that many dimensions; a name ending in .gz is unpacked."""
    path = Path(file)
    with open_regular(path, LARGEST + HEADER, DataError) as packed:
        try:
            stream = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            return _parse(path, stream, dimensions)
        except (EOFError, zlib.error) as error:
            raise DataError(f"{path}: gzip data are truncated or damaged: {error}") from error


def read_labelled(images: str | Path, labels: str | Path) -> tuple[UInt8[Tensor, "count h w"], UInt8[Tensor, "count"]]:
    """Images and the label of each."""
    pictures, classes = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(classes):
        raise DataError(f"{labels}: expected {len(pictures)} labels, one per image of {images}, got {len(classes)}")
    return pictures, classes


def _parse(path: Path, stream: Stream, dimensions: int) -> Tensor:
    wanted = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    magic = stream.read(4)
    if magic != wanted:
        raise DataError(
            f"{path}: expected the idx magic number 0x{wanted.hex()} (bytes in {dimensions} dimensions), "
            f"got {'0x' + magic.hex() if magic else 'an empty file'}"
        )
    header = stream.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(f"{path}: expected {dimensions} lengths after the magic number, the file ends before")
    shape = struct.unpack(f">{dimensions}I", header)
    size = math.prod(shape)
    if not 0 < size <= LARGEST:
        raise DataError(f"{path}: expected 1 to {LARGEST} bytes of data, the header says {_times(shape)}")
    data = _read(stream, size)
    if len(data) < size:
        raise DataError(f"{path}: expected {_times(shape)} = {size} bytes of data, got {len(data)}")
    if stream.read(1):
        raise DataError(f"{path}: expected {_times(shape)} = {size} bytes of data, the file goes on after them")
    return torch.frombuffer(data, dtype=torch.uint8).reshape(shape)


def _read(stream: Stream, size: int) -> bytearray:
    """`size` bytes or all there are; memory grows with what comes, not with what a header claims."""
    data = bytearray()
    while len(data) < size:
        chunk = stream.read(min(CHUNK, size - len(data)))
        if not chunk:
            break
        data += chunk
    return data


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
