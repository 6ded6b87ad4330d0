"""idx files: read to the byte, plain or gzipped, and refused by name when something is wrong with them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from retreever.data import idx
from retreever.data.idx import find_idx, read_idx, read_labelled
from retreever.errors import DataError

IMAGES = struct.pack(">4I", 0x803, 2, 3, 4) + bytes(range(24))
LABELS = struct.pack(">2I", 0x801, 2) + bytes([7, 46])
ZIPPED = gzip.compress(IMAGES, mtime=0)


def saved(folder: Path, data: bytes, name: str = "images") -> Path:
    file = folder / name
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(("name", "data"), [("images", IMAGES), ("images.gz", ZIPPED)])
def test_bytes_come_back_in_order_plain_and_gzipped(tmp_path: Path, name: str, data: bytes) -> None:
    saved(tmp_path, data, name)
    values = read_idx(find_idx(tmp_path, "images"), 3)
    assert values.dtype == torch.uint8
    assert torch.equal(values, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))


def test_data_longer_than_one_chunk_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "CHUNK", 5)
    assert read_idx(saved(tmp_path, ZIPPED, "images.gz"), 3).flatten().tolist() == list(range(24))


def test_images_come_with_their_labels(tmp_path: Path) -> None:
    images, labels = read_labelled(saved(tmp_path, IMAGES), saved(tmp_path, LABELS, "labels"))
    assert images.shape == (2, 3, 4) and labels.tolist() == [7, 46]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", r"expected the idx magic number 0x00000803 .*, got an empty file"),
        (b"\x00\x00", r"expected the idx magic number 0x00000803 .*, got 0x0000$"),
        (LABELS, r"expected the idx magic number 0x00000803 \(bytes in 3 dimensions\), got 0x00000801"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], r"expected the idx magic number 0x00000803 .*, got 0x00000d03"),
        (ZIPPED, r"expected the idx magic number 0x00000803 .*, got 0x1f8b"),
        (IMAGES[:10], r"expected 3 lengths after the magic number, the file ends before"),
        (IMAGES[:-1], r"expected 2 x 3 x 4 = 24 bytes of data, got 23"),
        (IMAGES + b"\x00", r"expected 2 x 3 x 4 = 24 bytes of data, the file goes on after them"),
        (struct.pack(">4I", 0x803, 0, 28, 28), r"expected 1 to \d+ bytes of data, the header says 0 x 28 x 28"),
        (struct.pack(">4I", 0x803, 2**32 - 1, 28, 28), r"the header says 4294967295 x 28 x 28"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_contents_that_break_the_format_are_named(tmp_path: Path, data: bytes, problem: str, zipped: bool) -> None:
    file = saved(tmp_path, gzip.compress(data) if zipped else data, "images.gz" if zipped else "images")
    with pytest.raises(DataError, match=problem) as error:
        read_idx(file, 3)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("length", range(1, len(ZIPPED)))
def test_a_gzip_file_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    file = saved(tmp_path, ZIPPED[:length], "images.gz")
    with pytest.raises(DataError) as error:
        read_idx(file, 3)
    assert str(error.value).startswith(f"{file}: ")


def test_a_truncated_gzip_file_is_called_truncated(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gzip data are truncated or damaged"):
        read_idx(saved(tmp_path, ZIPPED[:-9], "images.gz"), 3)


def test_a_flipped_bit_in_a_gzip_file_is_noticed(tmp_path: Path) -> None:
    """In the data, their checksum or their length; the last byte of the data is left out, being padding in part."""
    for place in (*range(10, len(ZIPPED) - 9), *range(len(ZIPPED) - 8, len(ZIPPED))):
        damaged = ZIPPED[:place] + bytes([ZIPPED[place] ^ 0x10]) + ZIPPED[place + 1 :]
        with pytest.raises(DataError):
            read_idx(saved(tmp_path, damaged, "images.gz"), 3)


def test_what_is_no_gzip_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"images\.gz: cannot be read: Not a gzipped file"):
        read_idx(saved(tmp_path, IMAGES, "images.gz"), 3)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"images: expected this file or images\.gz beside it, found neither"):
        find_idx(tmp_path, "images")
    with pytest.raises(DataError, match=r"images: cannot be read: No such file or directory"):
        read_idx(tmp_path / "images", 3)


def test_as_many_labels_as_images(tmp_path: Path) -> None:
    labels = saved(tmp_path, struct.pack(">2I", 0x801, 3) + bytes(3), "labels")
    with pytest.raises(DataError, match=r"labels: expected 2 labels, one per image of .*images, got 3"):
        read_labelled(saved(tmp_path, IMAGES), labels)
