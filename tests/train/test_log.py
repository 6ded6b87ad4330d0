"""What runs show and write: lines, bars, TensorBoard."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.train.log import Board, counted, open_tensorboard
from retreever.train.protocols import Progress

SHORT = ["train", "copy", "--n", "8", "--steps", "4", "--batch", "4", "--evaluate-every", "2", "--device", "cpu"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Scalars:
    """Stands for TensorBoard's writer."""

    written: list[tuple[str, float, int]]

    def __init__(self, log_dir: str) -> None:
        self.written = []
        Scalars.latest = self
        Path(log_dir).mkdir(parents=True)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def flush(self) -> None:
        pass


def test_a_terminal_shows_one_live_line_for_each_run() -> None:
    stream = Terminal()
    with Board(["one", "two"], stream=stream) as board:
        for index in (0, 1):
            board.watcher(index)(Progress(1, 4, loss=0.5, metric=None, seconds=1))
    assert "one" in stream.getvalue() and "two" in stream.getvalue()


def test_quiet_is_quiet() -> None:
    stream = io.StringIO()
    with Board(["one"], quiet=True, stream=stream) as board:
        board.watcher()(Progress(4, 4, loss=0.5, metric=1.0, seconds=1))
    assert stream.getvalue() == ""


def test_without_tensorboard_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main([*SHORT, "--tensorboard", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and 'pip install "retreever[log]"' in error
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_loss_terms_and_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Scalars  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert main([*SHORT, "--tensorboard", "--out", str(tmp_path)]) == 0
    names = {name for name, _, _ in Scalars.latest.written}
    assert {"loss/total", "loss/task", "loss/policy", "loss/leaves", "validation"} <= names
    assert {step for _, _, step in Scalars.latest.written} == {1, 2, 3, 4}
    watch = open_tensorboard(tmp_path / "again")
    watch(Progress(7, 9, loss=0.5, metric=None, seconds=1, terms={"total": 0.25}))
    assert Scalars.latest.written == [("loss/total", 0.25, 7)]


def test_long_evaluations_say_how_far_they_are_and_short_ones_nothing() -> None:
    lines, nothing = io.StringIO(), io.StringIO()
    assert list(counted(range(3), "rbf", 3000, seconds=0, stream=lines)) == [0, 1, 2]
    assert lines.getvalue().splitlines() == [f"rbf: {done} of 3,000 batches" for done in range(3)]
    assert list(counted(range(3), "rbf", 3, stream=nothing)) == [0, 1, 2]
    assert not nothing.getvalue()
