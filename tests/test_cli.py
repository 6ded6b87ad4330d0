"""The command line: quick help, and errors of one line."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.lab.recipes.recipe import make_recipe
from retreever.train.run import RunFolder
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
    for said in ("version", "--version"):
        assert main([said]) == 0
        assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense: expected one of demo, train, eval, pretrained, data, "),
        (["trian", "gp"], "bench, doctor, version (perhaps train)\n"),
        (["evaluate", "X"], "evaluate: expected one of demo, "),
        (["train", "gpp"], "gpp: expected one of copy, gp, emnist, celeba, activity, wheel (perhaps gp)\n"),
        (["train", "GP", "--quick"], "GP: expected one of copy, gp, emnist, celeba, activity, wheel (perhaps gp)\n"),
        (["data", "chekc"], "chekc: expected one of list, check, fetch (perhaps check)\n"),
        (["train", "gp", "--seeds", "0,1"], "--seeds: expected values separated by spaces, got ['0,1']"),
        (["eval", "no/run"], "no/run: expected the folder of a run, got a path that does not exist\n"),
        (["pretrained", "export", "no/run", "name"], "no/run: expected the folder of a run, got a path that does not"),
        (["eval", __file__], "expected the folder of a run, got a file\n"),
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


def train_copy(out: Path, *others: str) -> int:
    few = ["--n", "8", "--batch", "4", "--device", "cpu", "--out", str(out)]
    return main(["train", "copy", *few, *others])


def test_a_file_where_a_folder_should_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for status in (train_copy(file), main(["demo", "--out", str(file)])):
        assert status == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"retreever: {file}") and line.endswith(" written: Not a directory")


def test_an_operating_systems_error_without_a_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("no file")

    monkeypatch.setattr("retreever.cli.Version.run", fail)
    with pytest.raises(OSError, match="no file"):
        main(["version"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(unbuffered: str) -> None:
    """A full disk under standard output, or under standard error, where even that line has no place."""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        for words, stdout, stderr in ((["version"], full, subprocess.PIPE), (["bogus"], subprocess.PIPE, full)):
            command = [sys.executable, "-m", "retreever", *words]
            done = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, env=environment, check=False)
            assert done.returncode == 2
            if stderr is subprocess.PIPE:
                assert done.stderr == "retreever: output: cannot be read or written: No space left on device\n"


def test_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m retreever version >&- && {sys.executable} -m retreever bogus 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_a_log_that_cannot_be_written_does_not_end_training() -> None:
    from retreever.train.log import Board
    from retreever.train.protocols import Progress

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    with Board(["run"], seconds=0, stream=Full()) as board:
        board.watcher()(Progress(1, 2, 0.5, None, 1.0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "9" * 26], "seeds: expected an int < 2**63, got 9"),
        (["--branch", "9" * 26], "branch: expected an int < 2**63, got 9"),
        (["--batch", "9" * 26], "batch: expected an int < 2**63, got 9"),
        (["--batch", str(10**15)], "out of memory: "),
        (["--dim", "4000000", "--n", "4"], "out of memory: "),
    ],
)
def test_sizes_beyond_reason_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "copy", "--n", "8", "--steps", "2", "--warmup", "1", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"retreever: {message}") and error.count("\n") == 1 and len(error) < 2_100


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"tokens": 1}', '{"tokens": 1, "context": 2, "metric": "x", "scores": 3}']
)
def test_a_result_of_something_else_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "copy", "--n", "8", "--steps", "2", "--warmup", "1", "--out", str(tmp_path)]
    RunFolder(tmp_path / "copy-8-tca-seed0").start(
        make_recipe("copy", n=8, steps=2, warmup=1).to_json(), resume=False, overwrite=False
    )
    (tmp_path / "copy-8-tca-seed0" / "result.json").write_text(text)
    assert main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "result.json: expected" in error and error.count("\n") == 1


@pytest.mark.parametrize(("kind", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_stopped_by_a_signal_ends_as_shells_say(
    kind: signal.Signals,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from retreever.train.together import Run

    launch = Run.launch

    def launch_and_stop(run: Run) -> None:
        launch(run)
        os.kill(os.getpid(), kind)

    monkeypatch.setattr(Run, "launch", launch_and_stop)
    assert train_copy(tmp_path) == status
    assert f"retreever: stopped by {kind.name} after step 1; " in capsys.readouterr().err


def test_a_warm_up_as_long_as_the_run_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, warned, arguments in (
        ("long", 1, ["--steps", "2", "--warmup", "2", "--seeds", "0", "1"]),
        ("short", 0, ["--steps", "2", "--warmup", "1"]),
    ):
        assert train_copy(tmp_path / name, *arguments) == 0
        assert capsys.readouterr().err.count("warmup: expected fewer than the 2 steps, got 2;") == warned


def test_a_figure_without_a_name_lists_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", "--experiments", str(Path(__file__).parents[1] / "experiments")]) == 0
    assert "long_copy " in capsys.readouterr().out


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
