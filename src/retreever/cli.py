"""The command line. torch is imported only when a command runs, so that --help is fast."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes

from retreever.errors import ConfigError, RetreeverError, one_line
from retreever.lab.bench.options import (
    AttentionBench,
    BuildBench,
    EncodeBench,
    GrowBench,
    MemoryBench,
    ScaleBench,
    ShardedBench,
    TrainBench,
)
from retreever.lab.bench.options_models import (
    BanditBench,
    BudgetsBench,
    ExportBench,
    JobsBench,
    ModelsBench,
    OptimiseBench,
    RivalsBench,
    SeriesBench,
    StepsBench,
)
from retreever.lab.commands import group, one_of
from retreever.lab.data import Data
from retreever.lab.experiments.options import Collect, Experiment, Figure, Results, Table
from retreever.lab.export import Export
from retreever.lab.page.options import Page
from retreever.lab.pretrained.options import Evaluate, Pretrained
from retreever.lab.recipes.options import train_commands

ABOUT = "Tree Cross Attention: cross attention that reads O(log n) tokens."
BENCHES = (
    AttentionBench, BanditBench, BudgetsBench, BuildBench, EncodeBench, GrowBench, ExportBench, JobsBench, MemoryBench,
    ModelsBench, OptimiseBench, RivalsBench, ScaleBench, SeriesBench, ShardedBench, StepsBench, TrainBench,
)  # fmt: skip
Bench = group(
    "Measure speed, memory and scores on this machine; each leaves a table, JSON and a figure.",
    one_of({bench.name: bench for bench in BENCHES}),
)


@dataclass(frozen=True)
class Demo:
    """Train Cross Attention, Tree Cross Attention and Perceiver IO on the copy task and print the results."""

    out: Path = Path("runs/demo")
    """Folder for table, pictures and JSON."""
    n: int = 64
    """Length of the sequences, a power of two; half of it is context."""
    seed: int = 0
    """Seed of weights, data and sampled paths."""
    overwrite: bool = False
    """Replace the files of an earlier demo in the same folder."""
    budget: int | None = None
    """Test the trained tree, and draw its search, also with this many tokens per query; None reads one path alone."""

    def run(self) -> None:
        """Run the demo and print its table."""
        from rich.console import Console

        from retreever.lab.demo import run_demo

        table, _ = run_demo(self.out, self.n, self.seed, self.overwrite, self.budget)
        Console().print(table.to_rich())
        print(f"table, curves and the picture of one search are in {self.out}/")


@dataclass(frozen=True)
class Doctor:
    """Print versions and devices, and check every backend against the reference."""

    def run(self) -> int:
        """Print the report; returns 1 when a check fails, else 0."""
        from retreever.lab.doctor import run_doctor

        return run_doctor()


@dataclass(frozen=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Print the version."""
        from retreever.version import __version__

        print(__version__)


def commands_for(words: list[str]) -> Any:
    """All commands; `retreever train` with the defaults for the preset in `words`."""
    about = "Train models; every run has a folder with settings, metrics, checkpoints and result, and can be resumed."
    return one_of(
        {
            "demo": Demo,
            "train": group(about, train_commands(words)),
            "eval": Evaluate,
            "pretrained": Pretrained,
            "data": Data,
            "export": Export,
            "page": Page,
            "experiment": Experiment,
            "collect": Collect,
            "table": Table,
            "figure": Figure,
            "results": Results,
            "bench": Bench,
            "doctor": Doctor,
            "version": Version,
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `retreever` command; errors the library raises on purpose become one line."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _short_warnings():
            return _run(commands_for(words), words)
    except RetreeverError as error:
        return _fail(str(error), error.status)
    except BrokenPipeError:  # the reader, say `head`, has closed the pipe; the remaining work is not done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell gives for a program that SIGPIPE ended
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EBADF):
            raise
        return _fail(f"{error.filename or 'output'}: cannot be read or written: {error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        return _fail(f"out of memory: {str(error).partition(chr(10))[0]}", 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


def _fail(message: str, status: int) -> int:
    """Print one line, if there is anywhere to print it to, and return the exit status."""
    if sys.stderr is not None:  # closed by the shell; `print` would then take standard output
        with suppress(OSError, ValueError):
            print(f"retreever: {one_line(message)}", file=sys.stderr, flush=True)
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        if not _writable(stream):  # Python would try again at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return status


def _writable(stream: TextIO | None) -> bool:
    """Whether what was printed so far can be written; a stream closed by the shell is None and takes everything."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings as one line, without the place in the source they come from."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"retreever: warning: {one_line(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _run(commands: Any, words: list[str]) -> int:
    try:
        command = parse(commands, words)
        if not isinstance(command, Bench):  # benchmarks measure the machine in the state it was set up
            wait_briefly()
        return command.run() or 0
    finally:  # an error here, such as a closed pipe, is reported; at the end of Python it could not be
        if sys.stdout is not None:
            sys.stdout.flush()


def wait_briefly() -> None:
    """Let torch's threads spin only briefly between operations; must be called before torch is imported.

    By default they spin for milliseconds, which slows down other programs on the same cores: beside two busy programs
    training ran at an eighth of its speed, with this setting at a third to a half. Alone it costs about a tenth.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def parse(commands: Any, words: list[str]) -> Any:
    """The command in `words`; errors raise `ConfigError` with one line."""
    if words == ["--version"]:
        words = ["version"]
    check_names(commands, words)
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            return tyro.cli(commands, prog="retreever", args=words, description=ABOUT, config=(OmitArgPrefixes,))
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(_one_line(stderr.getvalue())) from None
        raise


def check_names(commands: Any, words: list[str]) -> None:
    """Raise `ConfigError` if the first word is not a command, or the second is not a subcommand of it."""
    for word in words:
        kinds = [kind for kind in get_args(commands) if get_origin(kind) is Annotated]
        known = {kind.__metadata__[0].name: kind.__origin__ for kind in kinds}
        if not known or word.startswith("-"):
            return
        if word not in known:
            matches = get_close_matches(word.lower(), known, 1)
            hint = f" (perhaps {matches[0]})" if matches else ""
            raise ConfigError(f"{word}: expected one of {', '.join(known)}{hint}")
        commands = get_type_hints(known[word], include_extras=True).get("what")


def _one_line(box: str) -> str:
    """The first paragraph of an error box of tyro, and the option it suggests, in one line."""
    lines = [line.strip("╭╮╰╯│|+ ") for line in box.splitlines()[1:]]  # the first is the box's title
    first = list(takewhile(_has_words, dropwhile(lambda line: not _has_words(line), lines)))
    option = next((line.split()[0] for line in lines if line.startswith("--") and _has_words(line)), "")
    text = re.sub(r"^Error parsing [\w.-]*what\.\w+: ", "", " ".join(first).rstrip("."))
    text = text.replace("Could not find valid parse for arguments:", "expected values separated by spaces, got")
    return f"{text}{f' (perhaps {option})' if option and f'{option}:' not in text else ''}; --help tells more"


def _has_words(line: str) -> bool:
    return bool(line.strip("─- "))


if __name__ == "__main__":
    sys.exit(main())
