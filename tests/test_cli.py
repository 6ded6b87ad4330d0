"""The command line: quick help, and errors of one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.version import __version__


def test_help_is_quick_and_loads_no_torch() -> None:
    code = "import sys, retreever.cli; assert 'torch' not in sys.modules; retreever.cli.main(['--help'])"
    took = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        took.append(time.perf_counter() - started)
        assert done.returncode == 0 and "demo" in done.stdout and "bench" in done.stdout
    assert min(took) < 0.5


def test_who_reads_the_output_may_have_seen_enough() -> None:
    command = [sys.executable, "-m", "retreever", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stderr is not None
        job.stdout.close()
        assert job.stderr.read() == b"" and job.wait() == 141


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "Unrecognized options: nonsense"),
        (["demo", "--nonsense", "1"], "--nonsense"),
        (["demo", "--n", "many"], "--n"),
        (["train", "copy", "--modle", "tca"], "--modle, tca (perhaps --model)"),
        (["train", "copy", "--model", "lstm"], "lstm"),
        (["train"], "copy"),
        ([], "demo"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("retreever: ") and error.count("\n") == 1 and said in error


def test_help_of_a_command_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "copy", "--help"])
    assert stopped.value.code == 0
    assert "--model" in capsys.readouterr().out


def test_benchmarks_take_their_options_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--quick", "--seconds", "0.05", "--n", "256", "--out", str(tmp_path)]
    assert main(["bench", "build", *arguments]) == 0
    assert "256" in capsys.readouterr().out
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".png"}
    assert main(["bench", "build", *arguments]) == 2  # nothing is overwritten without being asked
    assert "overwrite" in capsys.readouterr().err


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing about waiting threads, and is afterwards what it was."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize(
    ("chosen", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_spin_briefly_unless_told_otherwise(
    chosen: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert main(["version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.usefixtures("nothing_set")
def test_benchmarks_measure_the_machine_as_it_is_set_up(tmp_path: Path) -> None:
    assert main(["bench", "build", "--n", "0", "--out", str(tmp_path)]) == 2
    assert "GOMP_SPINCOUNT" not in os.environ
