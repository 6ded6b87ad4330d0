"""Archives from elsewhere: the wanted files come out whole, and nothing harmful or half-written ever does."""

from __future__ import annotations

import io
import stat
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retreever.data import unpack as module
from retreever.data.unpack import safe_entries, unpack
from retreever.errors import DataError

GOOD = {"gzip/a.txt": b"first", "gzip/b.txt": b"second" * 100, "other.txt": b"unwanted"}


def archive(folder: Path, entries: dict[str, bytes], *more: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    file = folder / "archive.zip"
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        warnings.simplefilter("ignore")  # of entries that come twice
        for name, data in (*entries.items(), *more):
            target.writestr(name, data)
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_only_the_wanted_files_come_out(tmp_path: Path) -> None:
    target = tmp_path / "new/folder"
    files = unpack(archive(tmp_path, GOOD), target, ["a.txt", "b.txt"])
    assert sorted(files) == [target / "a.txt", target / "b.txt"]
    assert contents(target) == {"a.txt": b"first", "b.txt": b"second" * 100}


def linked(kind: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("gzip/link")
    entry.create_system = 3
    entry.external_attr = (kind | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("entry", "data", "problem"),
    [
        ("../x", b"", r"entry '\.\./x': refused, it leads out of its folder"),
        ("gzip/../../x", b"", "leads out of its folder"),
        ("gzip\\..\\x", b"", "leads out of its folder"),
        ("/etc/x", b"", "entry '/etc/x': refused, it has an absolute"),
        ("C:/x", b"", "has an absolute"),
        ("C:x", b"", "has an absolute"),
        ("\\x", b"", "has an absolute"),
        (linked(stat.S_IFLNK), b"/etc/passwd", "entry 'gzip/link': refused, it is a link"),
        (linked(stat.S_IFIFO), b"", "is a link or another thing"),
        ("gzip/a.txt", b"again", "entry 'gzip/a.txt': refused, it comes twice"),
        ("GZIP/A.TXT", b"again", "entry 'GZIP/A.TXT': refused, it comes twice"),
        ("elsewhere/a.txt", b"again", "entry 'elsewhere/a.txt': expected a.txt once"),
    ],
)
def test_harmful_entries_are_refused_by_name(
    tmp_path: Path, entry: zipfile.ZipInfo | str, data: bytes, problem: str
) -> None:
    file, target = archive(tmp_path, GOOD, (entry, data)), tmp_path / "out/in"
    with pytest.raises(DataError, match=problem) as error:
        unpack(file, target, ["a.txt", "b.txt"])
    assert str(error.value).startswith(f"{file}, entry ") and "\n" not in str(error.value)
    assert contents(tmp_path) == {"archive.zip": file.read_bytes()}


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = archive(tmp_path, {"a.txt": bytes(100_000)})
    monkeypatch.setattr(module, "RATIO", 100)
    with pytest.raises(DataError, match=r"entry 'a.txt': refused, it claims 100,000 bytes packed into \d+"):
        unpack(file, tmp_path / "out", ["a.txt"])
    monkeypatch.setattr(module, "RATIO", 1_100)
    monkeypatch.setattr(module, "LARGEST", 99_999)
    with pytest.raises(DataError, match=r"entry 'a.txt': refused, it brings the archive to 100,000 bytes"):
        unpack(file, tmp_path / "out", ["a.txt"])
    assert not (tmp_path / "out").exists()


def test_an_entry_that_lies_about_its_size_is_damaged(tmp_path: Path) -> None:
    """More comes out than was promised: no more than that is written, and the checksum tells."""
    data = archive(tmp_path, {"a.txt": bytes(5_000)}).read_bytes()
    real, lie = (5_000).to_bytes(4, "little"), (50).to_bytes(4, "little")
    (tmp_path / "archive.zip").write_bytes(data.replace(real, lie))
    with pytest.raises(DataError, match=r"entry 'a.txt': damaged"):
        unpack(tmp_path / "archive.zip", tmp_path / "out", ["a.txt"])
    assert contents(tmp_path / "out") == {}


def test_a_damaged_entry_changes_nothing(tmp_path: Path) -> None:
    """Not even the files before it, and not those of an earlier time."""
    file, target = archive(tmp_path, {"a.txt": b"new", "b.txt": b"second" * 100}), tmp_path / "out"
    target.mkdir()
    (target / "a.txt").write_bytes(b"old")
    with zipfile.ZipFile(file) as source:
        start = source.getinfo("b.txt").header_offset + 40
    data = bytearray(file.read_bytes())
    data[start] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"entry 'b.txt': damaged"):
        unpack(file, target, ["a.txt", "b.txt"])
    assert contents(target) == {"a.txt": b"old"} and list(target.iterdir()) == [target / "a.txt"]


def test_encrypted_entries_are_refused(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path, {"a.txt": b"first"}).read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "archive.zip").write_bytes(data)
    with pytest.raises(DataError, match=r"entry 'a.txt': damaged: .*encrypted"):
        unpack(tmp_path / "archive.zip", tmp_path / "out", ["a.txt"])


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_exotic_packings_are_refused(tmp_path: Path, method: int, damaged: bool) -> None:
    """How much they unpack to cannot be bounded; damage in them must not look like a full disk either."""
    file = tmp_path / "archive.zip"
    with zipfile.ZipFile(file, "w", method) as target:
        target.writestr("a.txt", b"first" * 100)
    if damaged:
        data = bytearray(file.read_bytes())
        data[45:60] = bytes(15)
        file.write_bytes(data)
    with pytest.raises(DataError, match=rf"entry 'a.txt': refused, it is packed by method {method}; expected 0 "):
        unpack(file, tmp_path / "out", ["a.txt"])


@pytest.mark.parametrize(("local", "problem"), [(True, "entry 'é.txt': damaged: "), (False, "expected a zip archive")])
def test_names_that_are_no_utf8_are_damage(tmp_path: Path, local: bool, problem: str) -> None:
    """In an entry's own header, or in the table of contents."""
    file = archive(tmp_path, {"é.txt": b"first"})
    data = bytearray(file.read_bytes())
    data[(data.index if local else data.rindex)("é.txt".encode())] = 0xFF
    file.write_bytes(data)
    with pytest.raises(DataError, match=f"{problem}.*utf-8"):
        unpack(file, tmp_path / "out", ["é.txt"])


def test_an_entry_at_an_impossible_place_is_named(tmp_path: Path) -> None:
    """And not the folder, which can be written."""
    file = archive(tmp_path, {"a.txt": b"first"})
    data = bytearray(file.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    data[end + 16 : end + 20] = (2_000).to_bytes(4, "little")  # the table's place: entries then lie before the start
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"archive.zip, entry 'a.txt': cannot be read: "):
        unpack(file, tmp_path / "out", ["a.txt"])


def test_a_table_of_contents_longer_than_any_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIRECTORY", 150)
    with pytest.raises(DataError, match=r"a zip archive, got a table of contents of \d+ bytes, more than the 150"):
        unpack(archive(tmp_path, GOOD), tmp_path / "out", ["a.txt"])


def test_absent_entries_and_archives_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"archive.zip: expected an entry c.txt, found none"):
        unpack(archive(tmp_path, GOOD), tmp_path / "out", ["a.txt", "c.txt"])
    with pytest.raises(DataError, match=r"none.zip: cannot be read: No such file"):
        unpack(tmp_path / "none.zip", tmp_path / "out", ["a.txt"])
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(DataError, match=r"text.zip: expected a zip archive"):
        unpack(tmp_path / "text.zip", tmp_path / "out", ["a.txt"])


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = archive(tmp_path, {"a.txt": b"first"})
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(DataError, match=f"^{file}: expected a zip archive"):
            unpack(file, tmp_path / "out", ["a.txt"])


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "c:"]), min_size=1, max_size=5))
def test_a_name_that_is_let_through_stays_inside(parts: list[str]) -> None:
    name = "/".join(parts)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        target.writestr(zipfile.ZipInfo(name), b"")
    with zipfile.ZipFile(buffer) as source:
        try:
            safe_entries(source, Path("archive.zip"))
        except DataError:
            return
    assert Path("/root/folder", name).resolve().is_relative_to("/root/folder")
