"""Runs side by side: several seeds or settings train in one process, each with its own folder, graph and stream.

One small model leaves a GPU mostly idle. Steps of all runs are queued in turn, each on its run's own stream, so they
overlap there; a run gives the same bits alone as in company. On a CPU runs go one after another.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from retreever.errors import RetreeverError
from retreever.train.distributed import Agreement
from retreever.train.engine import Trainer
from retreever.train.protocols import Record, Watcher
from retreever.train.resume import record, resume_from, save
from retreever.train.run import RunFolder


class Stopped(RetreeverError):
    """A signal asked the run to stop; its last step is saved. `status` is what a shell gives for that signal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Run:
    """A trainer, its folder and who watch it; `failed` says what ended it early."""

    folder: RunFolder
    trainer: Trainer
    watchers: Sequence[Watcher] = ()
    failed: RetreeverError | None = None
    saved: int = -1

    @property
    def active(self) -> bool:
        """Whether there is more to do."""
        return self.failed is None and not self.trainer.done

    def launch(self) -> None:
        """One step; a run that fails ends alone, with its last good checkpoint in place."""
        try:
            self.trainer.launch()
        except RetreeverError as error:
            self.failed = error

    def settle(self) -> None:
        """Look at the steps so far, write down what is due."""
        trainer, records = self.trainer, len(self.trainer.history)
        try:
            progress = trainer.settle()
        except RetreeverError as error:
            self.failed = error
            return
        if len(trainer.history) > records:
            record(self.folder, trainer)
        for watch in self.watchers:
            watch(progress)
        if trainer.done or trainer.step % trainer.config.save_every == 0:
            self.save()

    def save(self) -> None:
        """A checkpoint of this very step, once; all processes take part."""
        if self.saved != self.trainer.step:
            save(self.folder, self.trainer)
        self.saved = self.trainer.step


def train_in(folder: RunFolder, trainer: Trainer, watch: Watcher | None = None) -> list[Record]:
    """Train to the end, from the newest checkpoint in `folder` if there is one, leaving files as it goes."""
    train_together([Run(folder, trainer, () if watch is None else (watch,))])
    return trainer.history


def train_together(runs: Sequence[Run]) -> None:
    """Train all to the end, each from its newest checkpoint; raises at the end when some failed.

    On a signal all are saved and `Stopped` is raised; a second one stops at once.
    """
    if not runs:
        return
    for run in runs:
        resume_from(run.folder, run.trainer)
    first = runs[0].trainer
    agreement = Agreement(first.ranks, first.device)
    with _signals() as asked:
        while active := [run for run in runs if run.active]:
            for run in active:
                run.launch()
            for run in active:
                if run.failed is None and run.trainer.due:
                    run.settle()
            if agreement.stop(bool(asked)) and (left := [run for run in active if run.active]):
                raise _stop(asked[0] if asked else "SIGTERM", left)
    failed = [run for run in runs if run.failed is not None]
    if len(runs) == 1 and failed:
        raise failed[0].failed or AssertionError
    if failed:
        raise RetreeverError("; ".join(f"{run.folder.path}: {run.failed}" for run in failed))


def _stop(name: str, runs: list[Run]) -> Stopped:
    """All saved where they stand."""
    for run in runs:
        if run.trainer.pending:
            run.settle()
        run.save()
    which = str(runs[0].folder.path) if len(runs) == 1 else f"{len(runs)} runs"
    message = f"stopped by {name} after step {runs[0].trainer.step}; {which} can be resumed"
    return Stopped(message, 128 + signal.Signals[name])


@contextmanager
def _signals() -> Iterator[list[str]]:
    """The names of signals that asked for an end so far; the second one ends at once."""
    asked: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    before: dict[Any, Any] = {}
    try:
        for kind in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(kind) is not signal.SIG_IGN:  # ignored for a job in the background of a shell
                before[kind] = signal.signal(kind, note)
    except ValueError:  # not in the main thread: signals are somebody else's business
        before.clear()
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
