"""Targets of CelebA: zip archives and the partition, and images in a folder or an archive."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from random import Random

from data import BOMB, checked
from edits import NUMBERS, Edit, Files, bytes_of, content, special_of, spoil_bytes
from PIL import Image
from runner import Target

from retreever.data.unpack import unpack
from retreever.tasks.celeba import CelebATask

NAMES = tuple(f"{number:06}.jpg" for number in range(1, 7))
ARCHIVE, PARTITION = "img_align_celeba.zip", "list_eval_partition.txt"
RECORDS = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22}  # headers of a zip and their lengths
TYPES = ("PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG")
METHODS = zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
BOMBS: dict[int, bytes] = {}  # archives by method, made once
PATHS = ("../out.jpg", "/out.jpg", "C:\\out.jpg", "a/../../out.jpg", "\x1b[31m.jpg", "x" * 4_000, "é.jpg", "a\\b.jpg")


def zips(base: Path) -> Target:
    """The archive of images and the partition."""
    files: Files = {ARCHIVE: packed(images()), PARTITION: partition()}
    edits = [
        *[bytes_of(ARCHIVE)] * 3, *[records_of(ARCHIVE)] * 4, *[entries_of(ARCHIVE)] * 3, bytes_of(PARTITION),
        lines_of(PARTITION), special_of(ARCHIVE, PARTITION),
    ]  # fmt: skip
    for method in METHODS:
        BOMBS[method] = _rebuilt([(zipfile.ZipInfo(NAMES[0]), bytes(BOMB), method)])
    return Target("zip", files, edits, [unpacked, unpacked, celeba, check_celeba])


def images() -> dict[str, bytes]:
    random = Random(0)
    found, exif = {}, Image.Exif()
    exif[0x011A], exif[0x010E] = 72.0, "a face"  # resolution, description
    for number, name in enumerate(NAMES):
        image, data = Image.frombytes("RGB", (44, 54), random.randbytes(44 * 54 * 3)), io.BytesIO()
        image.save(data, "JPEG", quality=60, progressive=number % 2 == 1, exif=exif)
        found[name] = data.getvalue()
    return found


def partition() -> bytes:
    return "".join(f"{name} {number // 2}\n" for number, name in enumerate(NAMES)).encode()


def packed(entries: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as target:
        for name, entry in entries.items():
            target.writestr(zipfile.ZipInfo(f"img_align_celeba/{name}"), entry, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def records_of(name: str) -> Edit:
    """Overwrite a field of one of the archive's headers."""

    def edit(random: Random, files: Files) -> str:
        data = bytearray(content(files, name))
        kind = random.choice(list(RECORDS))
        starts = [at for at in range(len(data)) if data[at : at + 4] == kind]
        start, size = random.choice(starts), random.choice((2, 2, 4))
        at = start + 2 * random.randrange(2, (RECORDS[kind] - size) // 2 + 1)
        data[at : at + size] = (random.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
        files[name] = bytes(data)
        return f"{name}: {kind!r} + {at - start}: {bytes(data[at : at + size])!r}"

    return edit


def entries_of(name: str) -> Edit:
    """Pack the archive again with an entry that should not be there, or not so."""

    def edit(random: Random, files: Files) -> str:
        change = random.choice(("path", "twice", "bomb", "method", "link", "image", "encrypted", "missing"))
        entries = {key: (zipfile.ZipInfo(key), data, zipfile.ZIP_DEFLATED) for key, data in images().items()}
        key = random.choice(NAMES)
        data = entries[key][1]
        if change == "path":
            entries["more"] = (zipfile.ZipInfo(random.choice(PATHS)), b"x", zipfile.ZIP_STORED)
        elif change == "twice":
            entries["more"] = (zipfile.ZipInfo(random.choice((f"a/{key}", key.upper()))), data, zipfile.ZIP_DEFLATED)
        elif change == "method":
            entries[key] = (zipfile.ZipInfo(key), data, random.choice(METHODS))
        elif change == "link":
            entries[key][0].external_attr = 0o120777 << 16
        elif change == "image":
            entries[key] = (zipfile.ZipInfo(key), spoil_bytes(random, data)[0], zipfile.ZIP_STORED)
        elif change == "missing":
            del entries[key]
        files[name] = BOMBS[random.choice(METHODS)] if change == "bomb" else _rebuilt(list(entries.values()))
        if change == "encrypted":
            files[name] = content(files, name).replace(
                b"PK\x01\x02\x14\x03\x14\0\0", b"PK\x01\x02\x14\x03\x14\0\x01", 1
            )
        return f"{name}: {change} {key}"

    return edit


def _rebuilt(entries: list[tuple[zipfile.ZipInfo, bytes, int]]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as target:
        for entry, content_, method in entries:
            target.writestr(entry, content_, method)
    return data.getvalue()


def lines_of(name: str) -> Edit:
    """Change a line of the partition."""

    def edit(random: Random, files: Files) -> str:
        lines = content(files, name).splitlines()
        at = random.randrange(len(lines))
        changed = (
            b"",
            b"000001.jpg",
            b"../../etc/passwd 0",
            b"/dev/zero 1",
            b"a b c 2",
            b"\x1b[31m 0",
            b"x" * 9_999 + b" 0",
        )
        lines[at] = random.choice((*changed, lines[at][:-1] + b"3", lines[0], b"\xff 1", b"a\\b 0"))
        files[name] = b"\n".join(lines)
        return f"{name}: line {at}: {lines[at][:40]!r}"

    return edit


def unpacked(folder: Path) -> None:
    unpack(folder / ARCHIVE, folder / "out", NAMES)


def celeba(folder: Path) -> None:
    task = CelebATask(folder, size=16, cache=folder / "cache")
    next(iter(task.validation()))
    next(iter(task.test()))


def check_celeba(folder: Path) -> str | None:
    return checked("celeba", folder)


def pictures(base: Path) -> Target:
    """Images in a folder."""
    files: Files = {f"img_align_celeba/{name}": data for name, data in images().items()}
    edits = [*[bytes_of(*files)] * 5, *[segments_of(*files)] * 4, *[other_image(*files)] * 2, special_of(*files)]
    return Target(
        "image", files | {PARTITION: partition()}, edits, [celeba, celeba, celeba, celeba_zipped, check_celeba]
    )


def celeba_zipped(folder: Path) -> None:
    """The same images from an archive."""
    source = folder / "img_align_celeba"
    found = {file.name: file.read_bytes() for file in source.iterdir() if file.is_file() and not file.is_symlink()}
    (folder / ARCHIVE).write_bytes(packed(found))
    celeba(folder)


def segments_of(*names: str) -> Edit:
    """Change, repeat or drop a segment of a JPEG: its size, tables, dimensions, metadata."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        data = content(files, name)
        starts = [at for at in range(2, len(data) - 4) if data[at] == 0xFF and 0xC0 <= data[at + 1] < 0xFF]
        at = random.choice(starts[:12])
        end = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        change = random.choice(("bytes", "bytes", "length", "kind", "repeat", "drop"))
        segment = data[at:end]
        if change == "bytes":
            segment = segment[:4] + spoil_bytes(random, segment[4:])[0]
        elif change == "length":
            segment = segment[:2] + struct.pack(">H", random.choice((0, 1, 2, 3, 2**15, 2**16 - 1))) + segment[4:]
        elif change == "kind":
            segment = bytes([0xFF, random.randrange(0xC0, 0xFF)]) + segment[2:]
        else:
            segment = segment * random.choice((2, 300)) if change == "repeat" else b""
        files[name] = data[:at] + segment + data[end:]
        return f"{name}: segment at {at}: {change}"

    return edit


def other_image(*names: str) -> Edit:
    """Another format, mode or size, as it is or spoilt."""

    def edit(random: Random, files: Files) -> str:
        name, kind = random.choice(names), random.choice(TYPES)
        size = random.choice(((1, 1), (1, 3_000), (44, 54), (1_000, 1_000), (1_100, 1_000)))
        image, data = Image.new(random.choice(("RGB", "L")), size), io.BytesIO()
        if kind == "JPEG":
            image = image.convert(random.choice(("CMYK", "L", "YCbCr")))
        image.save(data, kind)
        files[name] = data.getvalue() if random.random() < 0.5 else spoil_bytes(random, data.getvalue())[0]
        return f"{name}: {kind} of {size[0]} x {size[1]}"

    return edit
