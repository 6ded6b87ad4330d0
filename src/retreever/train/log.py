"""What runs show while they work: live bars on a terminal, plain lines elsewhere, TensorBoard files if wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from retreever.errors import BackendError
from retreever.train.protocols import Progress, Watcher

T = TypeVar("T")
WINDOW = 20  # looks over which the mean of the loss runs


class Board:
    """One live line per run: step, running mean of the loss, metric, steps per second, time left. A context manager.

    Not on a terminal a run has a plain line at most every `seconds`, and one at its end.

    Args:
        names: of the runs.
        metric: what validation measures.
        seconds: between plain lines of one run.
        quiet: show nothing.
        stream: standard error unless given.
    """

    def __init__(
        self,
        names: Sequence[str],
        metric: str = "accuracy",
        seconds: float = 5.0,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.names, self.metric, self.seconds, self.quiet = list(names), metric, seconds, quiet
        self.stream = sys.stderr if stream is None else stream
        self._shown = [float("-inf")] * len(self.names)
        self._means: list[float | None] = [None] * len(self.names)
        self._bars: Any = None

    def __enter__(self) -> Board:
        if not self.quiet and self.stream.isatty():
            self._bars = _bars(self.stream)
            self._bars.start()
            self._rows = [self._bars.add_task(name, total=None, note="") for name in self.names]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def watcher(self, index: int = 0) -> Watcher:
        """To be called with the progress of run `index`."""
        return lambda progress: self._show(index, progress)

    def _show(self, index: int, progress: Progress) -> None:
        if self.quiet:
            return
        before = self._means[index]
        mean = progress.loss if before is None else before + (progress.loss - before) / WINDOW
        self._means[index], progress = mean, replace(progress, loss=mean)
        if self._bars is not None:
            row, note = self._rows[index], _brief(progress)
            self._bars.update(row, total=progress.steps, completed=progress.step, note=note)
            return
        now, over = time.monotonic(), progress.step >= progress.steps
        if over or now - self._shown[index] >= self.seconds:
            self._shown[index] = now
            text = _describe(progress, self.metric)
            with suppress(OSError):  # a full disk under the log is no reason to stop training
                print(f"{self.names[index]}: {text}", file=self.stream, flush=True)


def counted(
    items: Iterable[T], name: str, total: int, seconds: float = 5.0, stream: TextIO | None = None
) -> Iterator[T]:
    """`items`, with a line on how many of `total` are through at most every `seconds`; short work says nothing."""
    shown = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - shown >= seconds:
            shown = time.monotonic()
            with suppress(OSError):
                print(f"{name}: {count:,} of {total:,} batches", file=stream or sys.stderr, flush=True)
        yield item


def summary_writer() -> Any:
    """TensorBoard's class; needs the extra `log`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        advice = 'pip install "retreever[log]"'
        raise BackendError(f"tensorboard: expected the package tensorboard, got none ({advice})") from None
    return SummaryWriter


def open_tensorboard(folder: Path) -> Watcher:
    """Writes loss terms and metric as TensorBoard scalars into `folder`."""
    writer = summary_writer()(log_dir=str(folder))

    def write(progress: Progress) -> None:
        for name, value in progress.terms.items():
            writer.add_scalar(f"loss/{name}", value, progress.step)
        if progress.metric is not None:
            writer.add_scalar("validation", progress.metric, progress.step)
        writer.flush()

    return write


def _describe(p: Progress, metric: str) -> str:
    rate = p.step / max(p.seconds, 1e-9)
    value = "-" if p.metric is None else f"{p.metric:.2f}"
    left = (p.steps - p.step) / rate
    return f"step {p.step}/{p.steps}  loss {p.loss:.3f}  {metric} {value}  {rate:.1f} steps/s  {left:.0f} s left"


def _brief(p: Progress) -> str:
    """As much as fits beside a bar on 80 columns."""
    rate = p.step / max(p.seconds, 1e-9)
    metric = "" if p.metric is None else f"  {p.metric:.1f}"
    return f"{p.step}/{p.steps}  loss {p.loss:.2f}{metric}  {rate:.0f}/s  {(p.steps - p.step) / rate:.0f} s left"


def _bars(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[note]}"))
    return Progress(*columns, console=Console(file=stream), transient=True)
