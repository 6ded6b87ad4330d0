"""Faults planted on purpose, to show that the runner finds them: prints the failures of each as JSON."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random

from edits import Files
from runner import Target, check_message, run_target

from retreever.errors import DataError


def untouched(random: Random, files: Files) -> str:
    return "nothing"


def foreign(folder: Path) -> None:
    raise KeyError("step")


def refused(folder: Path) -> None:
    raise DataError("two\nlines\x1b[31m" + "x" * 10_000)


def crash(folder: Path) -> None:
    ctypes.string_at(0)


def hang(folder: Path) -> None:
    time.sleep(60)


def memory(folder: Path) -> None:
    bytes(b"x" * 200_000_000)


def bomb(folder: Path) -> None:
    bytearray(2**33)


def caught(folder: Path) -> None:
    raise DataError("damaged: out of memory")


def warned(folder: Path) -> None:
    warnings.warn("careful", RuntimeWarning, stacklevel=2)


def printed(folder: Path) -> None:
    check_message("one\ntwo")


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        counts = {hang: 1, warned: 10}  # half of the mutations ignore warnings
        for way in (foreign, refused, crash, hang, memory, bomb, caught, warned, printed):
            target = Target(way.__name__, {"file": b"x"}, [untouched], [way])
            tally = run_target(target, 0, range(counts.get(way, 2)), Path(folder) / "work", patience=3.0)
            found[way.__name__] = {"mutations": tally.mutations, "failures": tally.failures}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
