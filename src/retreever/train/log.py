"""What a run shows while it works: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO

from retreever.train.engine import Progress


class ProgressLine:
    """One live line per run: step, loss, metric, steps per second, time left. A context manager and a watcher.

    Not on a terminal it is a line every `every` steps; 0 keeps silent.
    """

    def __init__(self, name: str, metric: str = "accuracy", every: int = 250, stream: TextIO | None = None) -> None:
        self.name, self.metric, self.every = name, metric, every
        self.stream = sys.stderr if stream is None else stream
        self._last: Progress | None = None
        self._bar: Any = None

    def __enter__(self) -> ProgressLine:
        if self.every and self.stream.isatty():
            self._bar = _bar(self.stream)
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._last is not None and kind is None and self.every:
            print(f"{self.name}: {_describe(self._last, self.metric)}, done", file=self.stream, flush=True)

    def __call__(self, progress: Progress) -> None:
        self._last = progress
        if self._bar is not None:
            note = _brief(progress)
            self._bar.update(self._task, total=progress.steps, completed=progress.step, note=note)
        elif self.every and progress.step % self.every == 0:
            print(f"{self.name}: {_describe(progress, self.metric)}", file=self.stream, flush=True)


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


def _bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[note]}"))
    return Progress(*columns, console=Console(file=stream), transient=True)
