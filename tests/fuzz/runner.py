"""Runs mutations of one kind in forked children: a crash, a hang or a memory bomb ends the child and is counted.

A child reports every mutation on a pipe. Where the next report is late the child is killed; where it died, the mutation
it was at is the failure, and another child goes on with the next one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from edits import Edit, Files, write_files

from retreever.errors import LONGEST, RetreeverError

PATIENCE = 10.0  # seconds a mutation may take
BOUND = 64  # MB that the process may grow by
GUARD = 2**31  # bytes of address space beyond those in use: a bomb ends in MemoryError, not in a full machine
NO_MEMORY = re.compile(r"out of memory|alloc\w* (\w+ )*memory|unable to allocate|MemoryError", re.IGNORECASE)
Way = Callable[[Path], object]  # reads the files in a folder; a str it returns is the outcome in place of "accepted"


class BrokenPromiseError(Exception):
    """A message on the terminal that is not one bounded line, or a fault that was hidden."""


@dataclass(frozen=True)
class Target:
    """Valid files of one kind, edits that spoil them, and ways to read them."""

    kind: str
    files: Files
    edits: Sequence[Edit]
    ways: Sequence[Way]


@dataclass
class Tally:
    """What became of the mutations of one kind."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: int = 0

    @property
    def mutations(self) -> int:
        return self.outcomes.total() + len(self.failures)


def run_target(target: Target, seed: int, indices: Sequence[int], work: Path, patience: float = PATIENCE) -> Tally:
    """Try all mutations; each depends on the kind, the seed and its index alone."""
    tally, start, left = Tally(target.kind), time.monotonic(), list(indices)
    while left:
        reports, ended = _in_child(lambda index: _attempt(target, seed, index, work), left, patience)
        for report in reports:
            index = left.pop(0)
            tally.megabytes = max(tally.megabytes, report["megabytes"])
            if report["failure"]:
                tally.failures.append(f"--kinds {target.kind} --seed {seed} --only {index}: {report['failure']}")
            else:
                tally.outcomes[report["outcome"]] += 1
        if ended and left:
            index = left.pop(0)
            note = _spoilt(target, seed, index)[2]
            tally.failures.append(f"--kinds {target.kind} --seed {seed} --only {index}: {note}: {ended}")
        shutil.rmtree(work, ignore_errors=True)
    tally.seconds = time.monotonic() - start
    return tally


def check_valid(target: Target, work: Path) -> None:
    """Valid files are accepted every way; also loads what the ways import, which is no growth of memory then."""
    for way in target.ways:
        work.mkdir(parents=True)
        write_files(work, target.files)
        assert way(work) is None, f"{target.kind}: {way.__name__} refuses valid files"
        shutil.rmtree(work)


def check_message(message: str) -> None:
    """Raises `BrokenPromiseError` unless it is one printable line of at most LONGEST characters, not about memory."""
    if len(message) > LONGEST or not message.isprintable():
        raise BrokenPromiseError(f"expected one printable line, got {len(message)} characters {message[:200]!r}")
    if NO_MEMORY.search(message):
        raise BrokenPromiseError(f"ran out of memory: {message[-300:]}")


def _attempt(target: Target, seed: int, index: int, work: Path) -> tuple[str, str]:
    """The outcome of a mutation, and the failure, empty where there is none."""
    random, files, note = _spoilt(target, seed, index)
    way = random.choice(target.ways)
    work.mkdir(parents=True)
    write_files(work, files)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(random.choice(("error", "ignore")))  # both are common
            warnings.filterwarnings("ignore", "(?s).* threads, resumed with ", UserWarning)
            outcome = way(work)
    except RetreeverError as error:
        outcome = type(error).__name__
        try:
            check_message(str(error))
        except BrokenPromiseError as broken:
            return "", f"{note}; {way.__name__}: {broken}"
    except BaseException as error:
        place = [
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
        ]
        text = f"{type(error).__name__}: {str(error)[:300]!r} at {' '.join(place[-4:])}"
        return "", f"{note}; {way.__name__}: {text}"
    finally:
        shutil.rmtree(work)
    return outcome if isinstance(outcome, str) else "accepted", ""


def _spoilt(target: Target, seed: int, index: int) -> tuple[Random, Files, str]:
    """The source of further choices, the spoilt files, and what was done to them."""
    random = Random(f"{target.kind} {seed} {index}")
    files = dict(target.files)
    return random, files, random.choice(target.edits)(random, files)


def _in_child(
    attempt: Callable[[int], tuple[str, str]], indices: Sequence[int], patience: float
) -> tuple[list[dict[str, Any]], str]:
    """Reports of a forked child, and how it ended before its time, if it did."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _work(attempt, indices, writing)
        except BaseException:
            traceback.print_exc()  # of this tool, not of the library
            os._exit(1)
        os._exit(0)
    os.close(writing)
    reports, late = _listen(reading, patience)
    if late:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if late:
        return reports, f"no answer within {patience:g} s"
    return reports, f"the process ended with status {status}" if status else ""


def _work(attempt: Callable[[int], tuple[str, str]], indices: Sequence[int], pipe: int) -> None:
    """In the child: try all, report each; a child that grew too large reports that as a failure and ends."""
    gc.freeze()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GUARD, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _peak()
    for index in indices:
        outcome, failure = attempt(index)
        grown = _peak() - before
        if grown > BOUND and not failure:
            failure = f"grew by {grown} MB, more than {BOUND}; {outcome}"
        report = {"outcome": outcome, "failure": failure, "megabytes": grown}
        os.write(pipe, json.dumps(report).encode() + b"\n")
        if grown > BOUND:
            return


def _peak() -> int:
    """MB of memory the process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _listen(pipe: int, patience: float) -> tuple[list[dict[str, Any]], bool]:
    """Reports until the pipe is closed, and whether the next one was late."""
    data, late = b"", False
    while not late:
        late = not select.select([pipe], [], [], patience)[0]
        piece = b"" if late else os.read(pipe, 2**16)
        if not piece:
            break
        data += piece
    os.close(pipe)
    return [json.loads(line) for line in data.splitlines()], late
