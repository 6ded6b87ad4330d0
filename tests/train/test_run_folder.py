"""A run folder has one owner, survives a kill at any moment of its start, and keeps nothing that nobody needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retreever.errors import ConfigError
from retreever.train.run import RunFolder, read_json

SETTINGS = {"n": 8, "text": "x" * 100}
ROUNDS = 150


def start(folder: RunFolder, **ways: bool) -> None:
    folder.start(SETTINGS, **{"resume": False, "overwrite": False} | ways)


def race(folder: Path, rounds: int = ROUNDS, processes: int = 3) -> int:
    """How often a new folder, started by several processes at the same moment, had one owner."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
    single = 0
    for number in range(rounds):
        gate, ready = os.pipe(), os.pipe()
        children = []
        for _ in range(processes):
            if (child := os.fork()) == 0:
                os.close(gate[1])
                os.write(ready[1], b".")
                os.read(gate[0], 1)  # returns in all of them once the parent closes its end
                try:
                    start(RunFolder(folder / str(number)))
                except ConfigError:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        for _ in children:
            os.read(ready[0], 1)
        for end in (*gate, *ready):
            os.close(end)
        owners = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children].count(0)
        assert RunFolder(folder / str(number)).config() == SETTINGS
        single += owners == 1
    return single


def crash_everywhere(folder: Path, *ways: str) -> int:
    """Crash before each thing that a start does to the file system; afterwards every way to start works."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
    for moment in range(1_000):
        place = RunFolder(folder / str(moment))
        if ways:
            start(place)
            place.finish({"test": 1.0})
            place.checkpoints.mkdir()
        if (child := os.fork()) == 0:
            count = iter(range(moment))

            def crash(event: str, _: object, count: Any = count) -> None:
                if event.startswith(("open", "os.", "shutil.")) and next(count, None) is None:
                    os._exit(1)

            sys.addaudithook(crash)
            start(place, **dict.fromkeys(ways, True))
            os._exit(0)
        crashed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        begun = (place.path / "config.json").exists()
        start(place, resume=begun, overwrite=False)
        assert place.config() == SETTINGS
        start(place, overwrite=True)
        assert sorted(path.name for path in place.path.iterdir()) == [".lock", "config.json"]
        if not crashed:
            return moment
    raise AssertionError("no start came through")


def test_simultaneous_starts_have_one_owner_and_a_crash_at_any_moment_blocks_nothing(tmp_path: Path) -> None:
    """In a new process, from which forking is cheap and safe; new runs and runs that replace another crash."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    single, moments_new, moments_overwrite = json.loads(done.stdout)
    assert single == ROUNDS and moments_new > 5 and moments_overwrite > 5


def test_drafts_of_a_killed_writer_are_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    start(folder)
    for name in ("config.json", "metrics.jsonl", "result.json"):
        (tmp_path / f".{name}.0123abcd.tmp").write_text("half")
    start(folder, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json"]


def test_a_run_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    folder = RunFolder(tmp_path / "link")
    start(folder)
    folder.finish({"test": 1.0})
    start(folder, overwrite=True)
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "disk" / "result.json").exists()


def test_links_inside_a_run_are_removed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of work")
    folder = RunFolder(tmp_path / "run")
    start(folder)
    (folder.path / "notes").symlink_to(tmp_path / "thesis")
    start(folder, overwrite=True)
    assert not (folder.path / "notes").exists() and (tmp_path / "thesis" / "text").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="cannot be written"):
        start(RunFolder(tmp_path / "run"))
    assert (tmp_path / "victim").read_text() == "kept"


def test_settings_that_differ_in_type_alone_say_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start({"steps": "12"}, resume=False, overwrite=False)
    with pytest.raises(ConfigError, match=r"steps='12', got steps=12$"):
        folder.start({"steps": 12}, resume=True, overwrite=False)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b"{", b"[]", b"1" * 5_000])
def test_settings_that_are_no_json_object_are_one_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*config\.json: expected .*JSON[^\n]*$"):
        read_json(tmp_path / "config.json")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    moments = [crash_everywhere(root / "new"), crash_everywhere(root / "over", "overwrite")]
    print(json.dumps([race(root / "race"), *moments]))
