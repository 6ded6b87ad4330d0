"""The target of run folders: settings, result, metrics and lock of a finished or a stopped run."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from edits import Edit, Files, bytes_of, content, json_of, read_files, special_of, spoil_json
from runner import Target
from trained import RECIPE, RUN, SETTINGS, a_trainer, command, finished_run

from retreever.lab.experiments.collect import learning_curve
from retreever.lab.recipes.command import load_run, saved_settings
from retreever.train.run import RunFolder
from retreever.train.together import train_in


def run_folders(base: Path) -> Target:
    """A finished run: resumed, replaced, scored, exported, collected."""
    files = read_files(finished_run(base / "finished").parent)
    config, result, metrics, lock = (
        f"{RUN}/{name}" for name in ("config.json", "result.json", "metrics.jsonl", ".lock")
    )
    edits = [
        bytes_of(config, result, metrics, lock), special_of(config, result, metrics, lock), *[json_of(config)] * 3,
        *[json_of(result)] * 2, lines_of(metrics), unfinished(json_of(config)), unfinished(bytes_of(metrics, lock)),
    ]  # fmt: skip
    ways = [start, start, replace_run, load_best, load_best, curve, curve, train_again, export, finish]
    return Target("run", files, edits, ways)


def lines_of(name: str) -> Edit:
    """Spoil the entries of one line."""

    def edit(random: Random, files: Files) -> str:
        lines = content(files, name).splitlines()
        at = random.randrange(len(lines))
        lines[at], note = spoil_json(random, json.loads(lines[at]))
        files[name] = b"\n".join(lines) + random.choice((b"\n", b"", b"\n\n"))
        return f"{name}: line {at}: {note}"

    return edit


def unfinished(edit: Edit) -> Edit:
    """The edit on a run without a result."""

    def both(random: Random, files: Files) -> str:
        files.pop(f"{RUN}/result.json")
        return f"unfinished, {edit(random, files)}"

    return both


def start(folder: Path) -> None:
    run = RunFolder(folder / RUN)
    run.start(RECIPE.to_json(), resume=True, overwrite=False, translate=saved_settings)
    run.name()


def replace_run(folder: Path) -> None:
    RunFolder(folder / RUN).start(RECIPE.to_json(), resume=False, overwrite=True)


def finish(folder: Path) -> None:
    """What `retreever train --resume` does with a run that was stopped."""
    run = RunFolder(folder / RUN)
    run.start(RECIPE.to_json(), resume=True, overwrite=False, translate=saved_settings)
    train_in(run, a_trainer())


def load_best(folder: Path) -> None:
    load_run(folder / RUN)


def curve(folder: Path) -> None:
    learning_curve(folder / RUN / "metrics.jsonl")


def train_again(folder: Path) -> str | None:
    if not (folder / RUN / "result.json").exists():
        return finish(folder)  # the command would draw figures, which takes long
    options = [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return command("train", "copy", "--quick", *options, "--device", "cpu", "--out", str(folder), "--resume")


def export(folder: Path) -> str | None:
    return command("pretrained", "export", str(folder / RUN), "tiny", "--out", str(folder / "weights"))
