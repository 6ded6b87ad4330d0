"""Collects run folders into the results files: settings, data, hardware, scores and learning curve of each run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retreever.arguments import check_choice
from retreever.errors import ConfigError
from retreever.files import read_bytes
from retreever.lab.experiments.planned import PlannedRun
from retreever.lab.experiments.results import Entry, check_entry, load_results, save_results
from retreever.lab.recipes.tasks import TASKS
from retreever.train.run import RunFolder, read_json

LEFT_OUT = ("format", "task", "seed", "evaluate_every", "save_every", "keep", "quick")  # of a run's settings
GENERATED = ("copy", "gp")
MAX_METRICS = 100_000_000  # bytes of metrics.jsonl
MOST_POINTS = 60  # of a learning curve


def collect(
    planned: Iterable[PlannedRun], runs: Path, folder: Path, data_note: Mapping[str, str], overwrite: bool = False
) -> list[str]:
    """Collect those of the `planned` runs that are finished into the results in `folder`; returns their names.

    `data_note` describes the data files of a task, which run folders do not record. `overwrite` replaces results of an
    earlier run of the same name with other scores.
    """
    for task in data_note:
        check_choice("data_note", task, tuple(TASKS))
    found = {run.name: (run, entry) for run in planned if (entry := _entry(run, runs, data_note)) is not None}
    for task in sorted({run.recipe.task.name for run, _ in found.values()}):
        known = load_results(folder, [task])
        fresh = {name: entry for name, (run, entry) in found.items() if run.recipe.task.name == task}
        for name, entry in fresh.items():
            same = name in known and known[name]["scores"] == entry["scores"]
            if same and entry["data"] is None:
                entry["data"] = known[name]["data"]  # noted when it was first collected
            if name in known and not same and not overwrite:
                raise ConfigError(f"{name}: expected the scores collected before, got others (--replace takes these)")
        save_results(folder, task, known | fresh)
    return sorted(found)


def _entry(run: PlannedRun, runs: Path, data_note: Mapping[str, str]) -> Entry | None:
    """The entry of a run in the results; None while it is not finished."""
    folder = RunFolder(runs / run.name)
    if not folder.result.exists():
        return None
    config, result = folder.config(), read_json(folder.result)
    if differs := run.differs(config):
        raise ConfigError(f"{folder.path}: expected the run of the recipe file, got another {', '.join(differs)}")
    task = run.recipe.task.name
    kept = ("scores", "metric", "tokens", "context", "steps", "seconds", "parameters", "hardware", "versions")
    entry = {
        "settings": {key: value for key, value in config.items() if key not in LEFT_OUT},
        "seed": config["seed"],
        **{key: result[key] for key in kept if key in result},
        "data": data_note.get(task, "generated" if task in GENERATED else None),
        "curve": learning_curve(folder.metrics),
    }
    check_entry(entry, str(folder.result))
    return entry


def learning_curve(file: Path) -> list[list[float]]:
    """Step, metric and seconds of at most 60 evaluations, evenly spread, including the last one."""
    if not file.exists():
        return []
    data = read_bytes(file, MAX_METRICS, ConfigError)
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in data.decode("utf-8").splitlines()]
        points = [[row["step"], round(row["metric"], 4), round(row["seconds"], 1)] for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file}: expected lines with step, metric and seconds, got {error!r}") from None
    every = -(-len(points) // MOST_POINTS) or 1
    return points[len(points) - 1 :: -every][::-1] if points else []
