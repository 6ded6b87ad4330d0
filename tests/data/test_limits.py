"""Readers take what their formats can need: no bombs, no endless lines, no pipes or devices, within little memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import threading
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from retreever.data import activity_file, celeba_files, idx
from retreever.data.activity_file import TAGS, read_rows
from retreever.data.cache import cached_file, is_whole
from retreever.data.celeba_files import Source, decode, read_partition
from retreever.data.idx import read_idx
from retreever.data.unpack import unpack
from retreever.errors import DataError
from retreever.lab.data_check import check

LITTLE = 5 * 2**20  # bytes of memory


def refused(call: Callable[[], object], message: str) -> None:
    """In one line, within little memory, and without a wait."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    tracemalloc.start()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not thread.is_alive(), "still waiting"
    with pytest.raises(DataError, match=message) as caught:
        raise errors[0]
    assert "\n" not in str(caught.value) and peak < LITTLE


def jpeg(width: int = 44, height: int = 54) -> bytes:
    """A small JPEG whose header claims that size."""
    data = io.BytesIO()
    Image.new("RGB", (44, 54)).save(data, "JPEG")
    return data.getvalue().replace(struct.pack(">HH", 54, 44), struct.pack(">HH", height, width), 1)


def celeba(folder: Path, image: bytes, packing: int = zipfile.ZIP_DEFLATED) -> Callable[[], object]:
    """Reads a zip of that one image."""
    with zipfile.ZipFile(folder / "images.zip", "w", packing) as target:
        target.writestr("1.jpg", image)
    source = Source(folder / "images.zip", folder / "partition.txt")
    return lambda: list(decode(source, ["1.jpg"], 32))


READERS = {
    "activity": read_rows,
    "idx": lambda file: read_idx(file, 3),
    "partition": read_partition,
    "zip": lambda file: unpack(file, file.parent / "out", ["a.txt"]),
    "image": lambda file: list(decode(Source(file.parent, file), [file.name], 32)),
}


@pytest.mark.parametrize("reader", READERS)
def test_pipes_devices_sockets_and_folders_are_refused(reader: str, tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer; /dev/full and /dev/zero never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, problem in (
            ("pipe", "expected a regular file, got a pipe, device or socket"),
            ("folder", "Is a directory"),
            ("socket", ""),
        ):
            refused(lambda name=name: READERS[reader](tmp_path / name), f"{name}: cannot be read: {problem}")
    for device in ("/dev/full", "/dev/zero"):
        if reader != "image":  # those are looked up in a folder first
            refused(lambda device=device: READERS[reader](Path(device)), f"^{device}: cannot be read: expected a reg")


@pytest.mark.parametrize("reader", READERS)
def test_files_far_larger_than_any_official_one_are_not_read(reader: str, tmp_path: Path) -> None:
    """60 GB that take no place on the disk."""
    with open(tmp_path / "sparse", "wb") as stream:
        stream.truncate(60 * 10**9)
    refused(lambda: READERS[reader](tmp_path / "sparse"), r"sparse: expected at most [\d,]+ bytes, got 60,000,000,000")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux only")
def test_a_file_of_the_kernel_that_claims_to_be_empty_is_refused() -> None:
    refused(lambda: read_partition(Path("/proc/self/status")), "expected 0 bytes, its size, got more")


def packed(folder: Path, name: str, *parts: bytes) -> Path:
    with gzip.open(folder / name, "wb", compresslevel=1) as stream:
        for part in parts:
            stream.write(part)
    return folder / name


def test_an_endless_line_is_given_up(tmp_path: Path) -> None:
    file = packed(tmp_path, "rows.gz", *[bytes(2**20)] * 30)
    refused(lambda: read_rows(file), r"rows.gz, line 1: expected at most 1,000 characters, got more")


def test_more_rows_than_any_file_has_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_file, "LARGEST", 10_000)
    row = f"A01,{TAGS[0]},0,date,1,2,3,walking\n".encode()
    file = packed(tmp_path, "rows.gz", row * 1_000)
    refused(lambda: read_rows(file), r"rows.gz, line \d+: expected the file to end within 10,000 characters")


@pytest.mark.parametrize("number", ["1e308", "-1e19", "nan", "inf"])
@pytest.mark.parametrize("column", [2, 4])
def test_numbers_too_large_for_time_steps_or_positions_are_named(column: int, number: str, tmp_path: Path) -> None:
    fields = ["A01", TAGS[0], "0", "date", "1", "2", "3", "walking"]
    wrong = [*fields[:column], number, *fields[column + 1 :]]
    (tmp_path / "rows").write_text(f"{','.join(fields)}\n{','.join(wrong)}\n")
    refused(lambda: read_rows(tmp_path / "rows"), r"line 2: expected finite timestamp, x, y, z, below 1e\+19, got ")


def test_an_idx_file_that_unpacks_to_gigabytes_is_refused_by_its_header(tmp_path: Path) -> None:
    header = struct.pack(">4I", 0x803, 2**20, 32, 32)
    refused(lambda: read_idx(packed(tmp_path, "images.gz", header, bytes(10)), 3), "expected 1 to 268435456 bytes")


def test_an_idx_file_takes_no_more_memory_than_its_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "CHUNK", 2**16)
    file = packed(tmp_path, "images.gz", struct.pack(">4I", 0x803, 1, 10, 10), *[bytes(2**20)] * 30)
    refused(lambda: read_idx(file, 3), "expected 1 x 10 x 10 = 100 bytes of data, the file goes on after them")


@pytest.mark.parametrize("side", [2_000, 10_000, 65_535])
def test_an_image_that_claims_many_pixels_is_not_decoded(side: int, tmp_path: Path) -> None:
    refused(celeba(tmp_path, jpeg(side, side)), r"entry '1.jpg': expected at most 1,048,576 pixels, got ")


def test_an_image_of_many_bytes_is_not_unpacked(tmp_path: Path) -> None:
    refused(celeba(tmp_path, bytes(30 * 2**20)), r"entry '1.jpg': expected at most 4,194,304 bytes, got 31,457,280")


def test_an_entry_that_packs_more_than_it_claims_is_not_unpacked_whole(tmp_path: Path) -> None:
    size, claim = 30 * 2**20, 10_000
    read = celeba(tmp_path, bytes(size))
    file = tmp_path / "images.zip"
    crc = [struct.pack("<I", zlib.crc32(bytes(length))) for length in (size, claim)]
    data = file.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", claim)).replace(*crc)
    file.write_bytes(data)
    refused(read, r"entry '1.jpg': expected a JPEG image, got something else")


def test_a_record_of_the_cache_is_no_trap(tmp_path: Path) -> None:
    """One that is nested too deep, large, or a pipe, belongs to no whole file."""
    file = cached_file("set.bin", {}, lambda: [b"abc"], tmp_path)
    assert file is not None and is_whole(file)

    def check_whole() -> None:
        if not is_whole(file):
            raise DataError("not whole")

    record = file.with_name(f"{file.name}.json")
    good = json.loads(record.read_text())
    for text in ("[" * 100_000, json.dumps({**good, "more": "x" * 2**21})):
        record.write_text(text)
        assert not is_whole(file)
    for trap in (record, file):
        record.write_text(json.dumps({**good, "bytes": 0}))
        trap.unlink()
        os.mkfifo(trap)
        refused(check_whole, "not whole")
        trap.unlink()


def test_a_check_unpacks_no_bomb_and_names_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else reads an archive that was gzipped once more."""
    celeba(tmp_path, jpeg())()
    with zipfile.ZipFile(tmp_path / "images.zip", "a") as target:
        target.writestr("2.jpg", jpeg())
        target.writestr("3.jpg", jpeg())
    (tmp_path / "images.zip").rename(tmp_path / "Img.zip")
    (tmp_path / "list_eval_partition.txt").write_text("1.jpg 0\n2.jpg 1\n3.jpg 2\n")
    (tmp_path / "Img").mkdir()
    (tmp_path / "Img.zip").rename(tmp_path / "Img/img_align_celeba.zip")
    assert check("celeba", tmp_path).fault == ""
    bomb = packed(tmp_path, "img_align_celeba.zip.gz", bytes(10_000))
    monkeypatch.setattr("retreever.lab.data_check.LARGEST", 9_999)
    assert check("celeba", tmp_path).fault == f"{bomb}: expected at most 9,999 bytes unpacked, got more"
    bomb.write_bytes(bomb.read_bytes()[:-9])
    assert "img_align_celeba.zip.gz: gzip data are truncated or damaged" in check("celeba", tmp_path).fault


def test_official_sizes_are_within_the_limits() -> None:
    """EMNIST's training images, CelebA's images and partition, and the activity rows."""
    assert idx.LARGEST > 2 * 112_800 * 28 * 28
    assert celeba_files.MOST_PIXELS > 20 * 178 * 218
    assert celeba_files.MOST_PARTITION > 4 * 202_599 * 13
    assert activity_file.LARGEST > 2 * 164_860 * 161
