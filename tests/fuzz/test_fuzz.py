"""Spoilt files of every kind are accepted or refused in one line, within seconds and megabytes (see mutate.py).

`RETREEVER_FUZZ=20000 pytest tests/fuzz` tries more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = int(os.environ.get("RETREEVER_FUZZ", "1000"))
GROUPS = (["checkpoint", "card"], ["run", "idx", "csv", "zip", "gz", "image", "idx"])  # one again: see below
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux tells it")


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, from which forking is safe."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(60 + COUNT)
@pytest.mark.parametrize("kinds", GROUPS, ids="-".join)
def test_spoilt_files_are_accepted_or_refused_in_one_line(kinds: list[str]) -> None:
    count = COUNT // 8 * len(kinds)
    done = run("mutate.py", "--count", count, "--kinds", *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{count:,} mutations" in done.stdout
    rows = [line.split("|")[1:6] for line in done.stdout.splitlines() if line.startswith("| idx")]
    assert len(rows) == kinds.count("idx")
    assert all(row == rows[0] and int(row[1]) == COUNT // 8 for row in rows)  # a seed gives the same mutations again


def test_planted_faults_are_found() -> None:
    done = run("planted.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(kind["mutations"] >= 1 for kind in found.values())
    wanted = {
        "foreign": "KeyError: \"'step'\"",
        "crash": "ended with status -11",
        "hang": "no answer within 3 s",
        "memory": "grew by ",
        "bomb": "MemoryError",
        "caught": "ran out of memory",
        "warned": "RuntimeWarning",
        "printed": "expected one printable line",
    }
    for kind, text in wanted.items():
        assert any(text in failure for failure in found[kind]["failures"]), found[kind]
        assert found[kind]["failures"][0].startswith(f"--kinds {kind} --seed 0 --only ")
    assert found["refused"]["failures"] == []  # the library's errors make one line of any text
