"""Spoils files of every kind the library reads and counts what becomes of them.

    python tests/fuzz/mutate.py --count 20000 --seed 0
    python tests/fuzz/mutate.py --kinds card --seed 0 --only 123     repeats one mutation

Every mutation must be accepted or refused by one of the library's own errors, in one bounded printable line, within
10 seconds and 64 MB. Anything else is a failure: it is printed with the options that repeat it, and the status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from data import gzipped, idx, rows
from pictures import pictures, zips
from runner import BOUND, PATIENCE, Tally, Target, check_valid, run_target
from runs import run_folders
from weights import cards, checkpoints

KINDS: dict[str, Callable[[Path], Target]] = {
    "checkpoint": checkpoints,
    "card": cards,
    "run": run_folders,
    "idx": idx,
    "csv": rows,
    "zip": zips,
    "gz": gzipped,
    "image": pictures,
}

HEAD = (
    "| kind | mutations | accepted | refused | failures | seconds | memory growth |",
    "|---|---:|---:|---|---:|---:|---:|",
)


def main() -> int:
    """Run the mutations, print the table and the failures; 1 when there are any."""
    options = parse()
    torch.set_num_threads(1)  # forked children have no other threads
    os.fsync = lambda handle: None  # type: ignore[assignment]  # the disk is not under test
    tallies = []
    print(*HEAD, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        base = Path(folder)
        os.environ["RETREEVER_CACHE"] = os.environ["RETREEVER_DATA"] = str(base / "none")
        os.chdir(base)
        for number, kind in enumerate(options.kinds):
            tallies.append(run_kind(kind, number, base, options))
            print(row(tallies[-1]), flush=True)
    total = sum(tally.mutations for tally in tallies)
    print(f"\n{total:,} mutations, {BOUND} MB and {PATIENCE:g} s allowed for each")
    failures = [failure for tally in tallies for failure in tally.failures]
    print(*failures, sep="\n")
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="mutations of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", type=int, help="the index of the one mutation to try")
    return parser.parse_args()


def run_kind(kind: str, number: int, base: Path, options: argparse.Namespace) -> Tally:
    """Make valid files of that kind, check that they are accepted, spoil them."""
    target = KINDS[kind](base / kind)
    stderr, quiet = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # readers say how far they are
    try:
        check_valid(target, base / "work")
        count = len(range(number, options.count, len(options.kinds)))
        return run_target(
            target, options.seed, [options.only] if options.only is not None else range(count), base / "work"
        )
    finally:
        os.dup2(stderr, 2)


def row(tally: Tally) -> str:
    """A row of the table, in Markdown."""
    refused = Counter({name: count for name, count in tally.outcomes.items() if name != "accepted"})
    text = ", ".join(f"{name} {count:,}" for name, count in refused.most_common())
    numbers = f"{tally.mutations:,} | {tally.outcomes['accepted']:,} | {text} | {len(tally.failures):,}"
    return f"| {tally.kind} | {numbers} | {tally.seconds:.0f} | {tally.megabytes} MB |"


if __name__ == "__main__":
    sys.exit(main())
