"""The command line. Help is quick because torch is loaded only once there is work to do."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, make_dataclass
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes
from tyro.conf import subcommand as named

from retreever.errors import ConfigError, RetreeverError
from retreever.lab.bench.options import AttentionBench, BuildBench, MemoryBench, TrainBench
from retreever.lab.data import Data
from retreever.lab.experiments.options import Collect, Experiment, Figure, Results, Table
from retreever.lab.pretrained.options import Evaluate, Pretrained
from retreever.lab.recipes.options import train_commands

ABOUT = "Tree Cross Attention: cross attention that reads O(log n) tokens."


@dataclass(frozen=True)
class Demo:
    """Train Cross Attention, Tree Cross Attention and Perceiver IO on the copy task and show what came out."""

    out: Path = Path("runs/demo")
    """Folder for table, pictures and JSON."""
    n: int = 64
    """Length of the sequences, a power of two; half of it is context."""
    seed: int = 0
    """Seed of weights, data and sampled paths."""
    overwrite: bool = False
    """Replace the files of an earlier demo in the same folder."""

    def run(self) -> None:
        """Run the demo and print its table."""
        from rich.console import Console

        from retreever.lab.demo import run_demo

        table, _ = run_demo(self.out, self.n, self.seed, self.overwrite)
        Console().print(table.to_rich())
        print(f"table, curves and the picture of one search are in {self.out}/")


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory on this machine; each leaves a table, JSON and a figure."""

    what: (
        Annotated[AttentionBench, named("attention", prefix_name=False)]
        | Annotated[BuildBench, named("build", prefix_name=False)]
        | Annotated[MemoryBench, named("memory", prefix_name=False)]
        | Annotated[TrainBench, named("train", prefix_name=False)]
    )

    def run(self) -> None:
        """Run the benchmark asked for."""
        self.what.run()


@dataclass(frozen=True)
class Doctor:
    """Print versions and devices, and check every backend against the reference."""

    def run(self) -> int:
        """Print the report; 1 when something is wrong."""
        from retreever.lab.doctor import run_doctor

        return run_doctor()


def train_command(words: list[str]) -> Any:
    """`retreever train`, with the defaults that `words` ask for."""

    def run(self: Any) -> None:
        self.what.run()

    about = "Train models; every run has a folder with settings, metrics, checkpoints and result, and can be resumed."
    space = {"run": run, "__doc__": about}
    return make_dataclass("Train", [("what", train_commands(words))], namespace=space, frozen=True)


@dataclass(frozen=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Print it."""
        from retreever.version import __version__

        print(__version__)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `retreever` command; errors the library raises on purpose become one line."""
    words = sys.argv[1:] if arguments is None else arguments
    train: Any = train_command(words)
    commands = (
        Annotated[Demo, named("demo")]
        | Annotated[train, named("train")]
        | Annotated[Evaluate, named("eval")]
        | Annotated[Pretrained, named("pretrained")]
        | Annotated[Data, named("data")]
        | Annotated[Experiment, named("experiment")]
        | Annotated[Collect, named("collect")]
        | Annotated[Table, named("table")]
        | Annotated[Figure, named("figure")]
        | Annotated[Results, named("results")]
        | Annotated[Bench, named("bench")]
        | Annotated[Doctor, named("doctor")]
        | Annotated[Version, named("version")]
    )
    try:
        return _run(commands, words)
    except RetreeverError as error:
        print(f"retreever: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # who read the output, say `head`, has seen enough; what was to come is not done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell gives for a program that SIGPIPE ended
    except OSError as error:
        if error.filename is None:
            raise
        print(f"retreever: {error.filename}: cannot be read or written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("retreever: stopped", file=sys.stderr)
        return 130


def _run(commands: Any, words: list[str]) -> int:
    try:
        command = parse(commands, words)
        if not isinstance(command, Bench):  # those measure the machine as it was set up
            wait_briefly()
        return command.run() or 0
    finally:  # here, and not when Python winds down, a closed pipe can still be dealt with
        sys.stdout.flush()


def wait_briefly() -> None:
    """Let torch's threads spin for a moment between operations; has to come before torch is loaded.

    They spin for milliseconds otherwise, on cores that other programs want too: beside two busy ones training came to
    an eighth of its speed, this way to a third or half. Alone it costs about a tenth.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def parse(commands: Any, words: list[str]) -> Any:
    """The command that `words` ask for; an error in them is one line."""
    if words == ["--version"]:
        words = ["version"]
    check_names(commands, words)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(commands, prog="retreever", args=words, description=ABOUT, config=(OmitArgPrefixes,))
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(_one_line(said.getvalue())) from None
        raise


def check_names(commands: Any, words: list[str]) -> None:
    """Refuse a first word that is no command, and a second one that is none of the first's."""
    for word in words:
        known = {one.__metadata__[0].name: one.__origin__ for one in get_args(commands) if get_origin(one) is Annotated}
        if not known or word.startswith("-"):
            return
        if word not in known:
            meant = get_close_matches(word.lower(), known, 1)
            perhaps = f" (perhaps {meant[0]})" if meant else ""
            raise ConfigError(f"{word}: expected one of {', '.join(known)}{perhaps}")
        commands = get_type_hints(known[word], include_extras=True).get("what")


def _one_line(box: str) -> str:
    """The first paragraph of what tyro says in a box, and the option it suggests."""
    lines = [line.strip("╭╮╰╯│|+ ") for line in box.splitlines()[1:]]  # the first is the box's title
    first = list(takewhile(_has_words, dropwhile(lambda line: not _has_words(line), lines)))
    meant = next((line.split()[0] for line in lines if line.startswith("--") and _has_words(line)), "")
    said = re.sub(r"^Error parsing [\w.-]*what\.\w+: ", "", " ".join(first).rstrip("."))
    said = said.replace("Could not find valid parse for arguments:", "expected values separated by spaces, got")
    return f"{said}{f' (perhaps {meant})' if meant and f'{meant}:' not in said else ''}; --help tells more"


def _has_words(line: str) -> bool:
    return bool(line.strip("─- "))


if __name__ == "__main__":
    sys.exit(main())
