"""Files are whole or absent: written in one step, forced to disk; a failure is one line and changes nothing."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from retreever.errors import CheckpointError, DataError, RetreeverError
from retreever.files import (
    make_folder,
    open_regular,
    os_errors,
    read_bytes,
    regular_only,
    sync_folder,
    write_bytes,
    write_synced,
    write_text,
)


def failing(reason: int):
    """A stand-in for a system call that fails."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(reason, os.strerror(reason))

    return fail


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_and_text_arrive_in_folders_made_on_the_way(tmp_path: Path) -> None:
    assert write_bytes(tmp_path / "a" / "b" / "raw", b"\x00\r\n\xff").read_bytes() == b"\x00\r\n\xff"
    assert write_text(str(tmp_path / "a" / "text"), "né\n").read_bytes() == "né\n".encode()
    assert (
        json.loads(write_text(tmp_path / "a" / "text", '"half a pair: \ud800"').read_bytes()) == "half a pair: \ud800"
    )
    assert names(tmp_path / "a") == ["b", "text"] and names(tmp_path / "a" / "b") == ["raw"]


def test_an_existing_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Who has the old file open keeps reading the old file."""
    file = write_text(tmp_path / "file", "a long old text")
    with open(file) as reader:
        write_text(file, "new")
        assert reader.read() == "a long old text"
    assert file.read_text() == "new" and names(tmp_path) == ["file"]


def test_the_disk_has_the_bytes_before_the_name_and_the_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes")
        fsync(handle)

    def note_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_bytes(tmp_path / "file", b"12345")
    assert calls == ["5 bytes", "replace", "folder"]
    calls.clear()
    make_folder(tmp_path / "a" / "b")  # b in a, and a in the one above
    make_folder(tmp_path / "a" / "b")  # nothing to wait for
    assert calls == ["folder", "folder"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    with pytest.raises(DataError) as caught:
        write_text(file, "new", DataError)
    assert str(caught.value) == f"{file}: cannot be written: No space left on device"
    assert isinstance(caught.value.__cause__, OSError)
    assert file.read_text() == "old" and names(tmp_path) == ["file"]


def test_an_interrupted_write_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "file", b"half")
    assert names(tmp_path) == []


def test_a_path_below_a_file_or_onto_a_folder_is_one_clear_line(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    (tmp_path / "folder").mkdir()
    for path, reason in (("file/below", "Not a directory"), ("folder", "Is a directory")):
        with pytest.raises(RetreeverError, match=f"^[^\n]*{path}: cannot be written: {reason}$"):
            write_text(tmp_path / path, "new")
    assert names(tmp_path) == ["file", "folder"] and (tmp_path / "file").read_text() == "old"


def test_a_synced_file_is_new_and_its_folder_exists(tmp_path: Path) -> None:
    """The plain building blocks raise what the system says."""
    write_synced(tmp_path / "file", b"1")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "file", b"2")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")
    assert (tmp_path / "file").read_bytes() == b"1"


def test_only_errors_of_the_system_are_translated() -> None:
    with (
        pytest.raises(CheckpointError, match=r"^a/b: cannot be read: odd$"),
        os_errors("a/b", "cannot be read", CheckpointError),
    ):
        raise OSError("odd")  # without a number, hence without a standard reason
    with pytest.raises(KeyError), os_errors("a/b", "cannot be read"):
        raise KeyError


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = write_bytes(tmp_path / "file", b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_bytes(file, 5) == read_bytes(tmp_path / "link", 5) == b"12345"
    with open_regular(file, 5) as stream:
        assert stream.read(2) == b"12"
    with pytest.raises(CheckpointError, match=r"^[^\n]*file: expected at most 4 bytes, got 5$"):
        read_bytes(file, 4, CheckpointError)


def test_only_regular_files_are_opened_and_links_are_not_written_through(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(DataError, match=f"^{path}: cannot be read: expected a regular file, got a pipe, device or"):
            read_bytes(path, 10, DataError)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_bytes(tmp_path, 10, DataError)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for mode in ("ab", "wb", "xb"):
        with pytest.raises(OSError):
            open(tmp_path / "link", mode, opener=regular_only)  # noqa: SIM115
    assert not (tmp_path / "target").exists()
