"""Cached files: whole or made again, one at a time, and nothing in the way where none can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retreever.data.cache import cached_file, digest, is_whole
from retreever.data.catalogue import cache_root
from retreever.errors import DataError

SETTINGS = {"size": 3}


class Maker:
    """Gives two pieces and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Iterator[bytes]:
        self.calls += 1
        yield b"abc"
        yield b"def"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_file_is_made_once_and_kept(tmp_path: Path) -> None:
    make = Maker()
    file = cached_file("set.bin", SETTINGS, make, tmp_path / "new/root")
    assert file is not None and file.read_bytes() == b"abcdef" and is_whole(file)
    assert cached_file("set.bin", SETTINGS, make, tmp_path / "new/root") == file and make.calls == 1
    assert names(file.parent) == [file.name, f"{file.name}.json"]


def test_other_settings_have_another_file(tmp_path: Path) -> None:
    files = {cached_file("set.bin", {"size": size}, Maker(), tmp_path) for size in (1, 2, 2)}
    assert len(files) == 2


def record_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"abcdeX"),
        lambda file: file.write_bytes(b"abc"),
        lambda file: file.unlink(),
        lambda file: record_of(file).unlink(),
        lambda file: record_of(file).write_text('{"bytes": 6'),
        lambda file: record_of(file).write_text("[]"),
        lambda file: record_of(file).write_text("{}"),
    ],
    ids=["a byte changed", "cut short", "absent", "no record", "half a record", "another record", "an empty record"],
)
def test_what_is_not_whole_is_made_again(tmp_path: Path, damage: object) -> None:
    make = Maker()
    file = cached_file("set.bin", SETTINGS, make, tmp_path)
    assert file is not None and callable(damage)
    damage(file)
    assert not is_whole(file)
    assert cached_file("set.bin", SETTINGS, make, tmp_path) == file
    assert file.read_bytes() == b"abcdef" and is_whole(file) and make.calls == 2


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Iterator[bytes]:
        yield b"abc"
        raise DataError("image 7: damaged")

    with pytest.raises(DataError, match=r"^image 7: damaged$"):
        cached_file("set.bin", SETTINGS, fails, tmp_path)
    assert names(tmp_path) == []
    assert cached_file("set.bin", SETTINGS, Maker(), tmp_path) is not None


KILLED = """
import os, sys
from retreever.data.cache import cached_file
def make():
    yield b"abc"
    print(flush=True)
    os.kill(os.getpid(), 9)
cached_file("set.bin", {"size": 3}, make, sys.argv[1])
"""


def test_a_killed_process_is_recovered_from(tmp_path: Path) -> None:
    """Its draft is no file of that name, and the next one to make the file removes it."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode < 0 and len(names(tmp_path)) == 1 and names(tmp_path)[0].endswith(".tmp")
    file = cached_file("set.bin", SETTINGS, Maker(), tmp_path)
    assert file is not None and names(tmp_path) == [file.name, f"{file.name}.json"]


SLOW = """
import sys, time
from pathlib import Path
from retreever.data.cache import cached_file
root, number = sys.argv[1:]
def make():
    Path(root, f"made-{number}").touch()
    for _ in range(10):
        time.sleep(0.05)
        yield bytes(1_000)
file = cached_file("set.bin", {"size": 3}, make, root)
assert file is not None and file.stat().st_size == 10_000
"""


@pytest.mark.skipif(os.name == "nt", reason="no such locks")
def test_of_several_processes_one_makes_the_file_and_the_others_wait(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path), str(number)]) for number in range(3)]
    assert [worker.wait(60) for worker in workers] == [0] * 3
    assert len(list(tmp_path.glob("made-*"))) == 1


def test_without_a_place_there_is_no_file_and_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    make = Maker()
    assert cached_file("set.bin", SETTINGS, make, blocked / "cache") is None
    assert "cannot be kept" in capfd.readouterr().err and blocked.read_text() == "in the way"


def test_a_full_disk_is_no_error_either(tmp_path: Path) -> None:
    def full() -> Iterator[bytes]:
        yield b"abc"
        raise OSError(28, "No space left on device")

    assert cached_file("set.bin", SETTINGS, full, tmp_path) is None and names(tmp_path) == []


def test_the_root_is_an_option_a_variable_or_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETREEVER_CACHE", str(tmp_path))
    assert cache_root() == tmp_path and cache_root("there") == Path("there")
    file = cached_file("set.bin", SETTINGS, Maker())
    assert file is not None and file.parent == tmp_path
    monkeypatch.delenv("RETREEVER_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/retreever")


def test_checksums_are_those_known(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert digest(tmp_path / "abc", "md5") == "900150983cd24fb0d6963f7d28e17f72"
    assert digest(tmp_path / "abc").startswith("ba7816bf8f01cfea")
