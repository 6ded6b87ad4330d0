"""Folders of checkpoints: what is kept, and that a kill, a full disk or a crash at any moment loses nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever import CheckpointError, InputError
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hidden(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".")]


def save(folder: Path, step: int, **options: Any) -> Path:
    """A checkpoint whose every file depends on the step."""
    return save_checkpoint(folder, step, {"w": torch.full((5_000,), float(step))}, {"step": step}, **options)


def step_of(path: Path | None) -> int:
    """The step of a checkpoint that loads and whose files belong together."""
    assert path is not None
    tensors, state = load_checkpoint(path)
    assert tensors["w"].shape == (5_000,) and bool((tensors["w"] == state["step"]).all())
    return int(state["step"])


# What is kept.


def test_the_newest_are_kept_and_the_latest_goes_by_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "absent") is None
    for step in (5, 10, 999_999_999, 1_000_000_000):
        path = save(tmp_path, step)
        assert latest_checkpoint(tmp_path) == path == tmp_path / f"step-{step:09d}"
    assert names(tmp_path) == ["step-1000000000", "step-999999999"]
    assert names(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    save(tmp_path, 1_000_000_001, keep=1)
    assert names(tmp_path) == ["step-1000000001"] and step_of(latest_checkpoint(tmp_path)) == 1_000_000_001


def test_the_one_just_written_stays_even_if_it_is_the_oldest(tmp_path: Path) -> None:
    for step in (7, 8, 3):
        save(tmp_path, step)
    assert [step_of(path) for path in sorted(tmp_path.iterdir())] == [3, 7, 8]


def test_only_what_bears_our_names_is_ever_deleted(tmp_path: Path) -> None:
    foreign = ("notes", "step-1", "step-000000001.bak", ".best.draft", ".best.12345678.tmp", ".x.y.12345678.draft")
    for name in (*foreign, "step-000000009"):  # the last without a manifest: not a complete checkpoint
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for step in (2, 3):
        save(tmp_path, step, keep=1)
    save(tmp_path, 3, name="best")
    assert names(tmp_path) == sorted((*foreign, "step-000000009", "step-000000003", "best"))
    assert step_of(latest_checkpoint(tmp_path)) == 3


def test_a_second_save_under_the_same_name_replaces_the_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        best = save(tmp_path, step, name="best")
        same = save_checkpoint(tmp_path, 5, {}, {"round": step})
        assert step_of(best) == step and load_checkpoint(same) == ({}, {"round": step})
    assert names(tmp_path) == ["best", "step-000000005"] and latest_checkpoint(tmp_path) == same


def test_a_named_save_leaves_the_numbered_ones_alone(tmp_path: Path) -> None:
    save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3, name="best", keep=1)
    assert names(tmp_path) == ["best", "step-000000001", "step-000000002"]


def test_drafts_of_killed_writers_go_at_the_next_save(tmp_path: Path) -> None:
    for draft in (".step-000000004.0123abcd.draft", ".best.89abcdef.draft"):
        (tmp_path / draft).mkdir()
        (tmp_path / draft / "state.json").write_text("{")
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000000004"]


def test_what_cannot_be_deleted_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*arguments: object, **options: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        save(tmp_path, 2, keep=1)
    assert names(tmp_path)[1:] == ["step-000000002"] and hidden(tmp_path) == names(tmp_path)[:1]
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000000003"]


@pytest.mark.parametrize("name", [None, "best"])
def test_a_crash_between_two_renames_leaves_the_old_one_loadable(name: str | None, tmp_path: Path) -> None:
    """Found where it was left aside, and put back by the next save of anything."""
    path = save(tmp_path, 6, name=name)
    path.rename(path.with_name(f".{path.name}.aside"))
    assert step_of(path) == 6 and latest_checkpoint(tmp_path) == (None if name else path)
    save(tmp_path, 5)
    assert hidden(tmp_path) == [] and path.exists() and step_of(path) == 6


def test_a_crash_after_both_renames_leaves_the_new_one(tmp_path: Path) -> None:
    path = save(tmp_path, 1, name="best")
    path.rename(tmp_path / ".best.aside")
    save(tmp_path / "elsewhere", 2, name="best").rename(path)
    assert step_of(path) == 2 and step_of(save(tmp_path, 3, name="best")) == 3 and hidden(tmp_path) == []


# What fails.


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".a", "step-000000001"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^name: expected letters, digits"):
        save(tmp_path, 1, name=name)
    assert names(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": 1.0}, {"step": 1, "keep": 0}])
def test_numbers_are_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{list(wrong)[-1]}: expected an int"):
        save_checkpoint(tmp_path, tensors={}, state={}, **wrong)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", [None, "best"])
@pytest.mark.parametrize("call", range(5))
def test_a_full_disk_is_one_line_and_loses_nothing(
    call: int, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of three files and two folders does not fit; once the last is reached, the new one is in place."""
    save(tmp_path, 1, name=name)
    calls = iter(range(5))

    def full(handle: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / (name or "step-000000002")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, name=name)
    assert str(caught.value) == f"{path}: checkpoint cannot be written: No space left on device"
    assert step_of(path if name else latest_checkpoint(tmp_path)) == (1 if call < 4 else 2)
    assert hidden(tmp_path) == [] and (name or step_of(tmp_path / "step-000000001") == 1)


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = save(tmp_path, 1, name="best"), os.replace

    def fail_once(source: Path, target: Path) -> None:
        if source.name.endswith(".draft"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(CheckpointError, match="best: checkpoint cannot be written: Input/output error"):
        save(tmp_path, 2, name="best")
    assert names(tmp_path) == ["best"] and step_of(path) == 1


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(
        CheckpointError, match=r"file/run/step-000000001: checkpoint cannot be written: Not a directory$"
    ):
        save(tmp_path / "file" / "run", 1)
    with pytest.raises(CheckpointError, match=r"file: cannot be read: Not a directory$"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"absent/manifest\.json: cannot be read: No such file or directory$"):
        load_checkpoint(tmp_path / "absent")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "kept"


# What is killed. These run in a process of their own, from which forking is cheap and safe.


def forked(work: Callable[[], object]) -> int:
    """Start a child that does the work and leaves without cleaning up."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kill_writers(folder: Path) -> dict[str, int]:
    """100 times: kill a writer at a random moment, then load. Counts kills and those that left half a save behind."""
    save(folder, 1), save(folder, 1, name="best")
    luck, found = random.Random(0), {"kills": 0, "halves": 0}

    def write_on() -> None:
        step = step_of(latest_checkpoint(folder))
        while True:
            step += 1
            save(folder, step), save(folder, step, name="best")

    for _ in range(100):
        before, best = step_of(latest_checkpoint(folder)), step_of(folder / "best")
        child = forked(write_on)
        time.sleep(luck.uniform(0.002, 0.04))
        os.kill(child, signal.SIGKILL)
        found["kills"] += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found["halves"] += bool(hidden(folder))
        after = step_of(latest_checkpoint(folder))
        assert before <= after and best <= step_of(folder / "best") <= after
    return found | {"steps": after}


def crash_everywhere(folder: Path) -> dict[str, int]:
    """Crash before the first, second, third ... thing a save does to the file system, until one comes through."""

    os.fsync = lambda handle: None  # only a power cut could tell the difference

    def save_and_crash(place: Path, moment: int) -> None:
        count = iter(range(moment))

        def crash(event: str, _: object) -> None:
            if event.startswith(("open", "os.", "shutil.")) and next(count, None) is None:
                os._exit(1)

        sys.addaudithook(crash)
        save(place, 3), save(place, 3, name="best"), save(place, 3)

    for moment in range(1_000):
        place = folder / str(moment)
        save(place, 1), save(place, 2), save(place, 2, name="best")
        child = forked(lambda place=place, moment=moment: save_and_crash(place, moment))  # type: ignore[misc]
        crashed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert step_of(latest_checkpoint(place)) in (2, 3) and step_of(place / "best") in (2, 3)
        save(place, 4)
        assert hidden(place) == [] and len(names(place)) == 3
        if not crashed:
            return {"moments": moment}
    raise AssertionError("no save came through")


def run_here(test: str, folder: Path) -> dict[str, int]:
    """What the function of that name finds, in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, test, folder], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_hundred_kills_during_saves_leave_checkpoints_that_load(tmp_path: Path) -> None:
    found = run_here("kill_writers", tmp_path)
    assert found["kills"] == 100 and found["halves"] >= 50 and found["steps"] > 20


def test_a_crash_at_any_moment_of_a_save_leaves_checkpoints_that_load(tmp_path: Path) -> None:
    assert run_here("crash_everywhere", tmp_path)["moments"] > 40


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
