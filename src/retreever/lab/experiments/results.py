"""Collected results in experiments/results/TASK.json: one line per run, for tables, figures and the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.recipes.tasks import TASKS
from retreever.train.run import read_json

Entry = dict[str, Any]
NEEDED = (
    "settings", "seed", "scores", "tokens", "context", "steps", "seconds", "hardware", "versions", "data", "curve",
)  # fmt: skip


def load_results(folder: Path, tasks: Iterable[str] = tuple(TASKS)) -> dict[str, Entry]:
    """All collected runs by name; tasks without a file have none."""
    found: dict[str, Entry] = {}
    for task in tasks:
        file = results_file(folder, task)
        runs = read_json(file).get("runs") if file.exists() else {}
        if not isinstance(runs, dict):
            raise ConfigError(f"{file}: expected runs by name, got {type(runs).__name__}")
        for name, entry in runs.items():
            check_entry(entry, f"{file}: {name}")
        found |= runs
    return found


def results_file(folder: Path, task: str) -> Path:
    """The file of the collected runs of a task."""
    return folder / "results" / f"{task}.json"


def save_results(folder: Path, task: str, runs: Mapping[str, Entry]) -> Path:
    """Write all runs of a task, sorted by name, a line each; returns the file."""
    lines = [f"  {json.dumps(name)}: {json.dumps(runs[name])}" for name in sorted(runs)]
    return write_text(results_file(folder, task), '{\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n", ConfigError)


def check_entry(entry: object, where: str) -> None:
    """Raise `ConfigError` unless a run has all entries of NEEDED and its scores are finite numbers."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a table, got {type(entry).__name__}")
    missing = [key for key in NEEDED if key not in entry]
    if missing:
        raise ConfigError(f"{where}: expected {', '.join(NEEDED)}, got none of {', '.join(missing)}")
    scores = entry["scores"]
    numbers = scores.values() if isinstance(scores, dict) else ()
    if not numbers or not all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in numbers):
        raise ConfigError(f"{where}: expected scores, each a finite number, got {scores}")
