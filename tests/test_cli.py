"""The command line: quick help, and errors of one line."""

from __future__ import annotations

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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--nonsense", "1"], ["demo", "--n", "many"]])
def test_unknown_words_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


def test_benchmarks_take_their_options_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--quick", "--seconds", "0.05", "--n", "256", "--out", str(tmp_path)]
    assert main(["bench", "build", *arguments]) == 0
    assert "256" in capsys.readouterr().out
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".png"}
    assert main(["bench", "build", *arguments]) == 2  # nothing is overwritten without being asked
    assert "overwrite" in capsys.readouterr().err
