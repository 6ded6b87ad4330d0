"""Which settings are best on validation? Trains the variants of a TOML file side by side; the test set is never read.

    python experiments/sweep.py experiments/sweeps/activity_retreever.toml --data ~/datasets --out runs/sweep.json

The file has a `task`, `settings` of all runs, `seeds`, and `variants`: settings to change, all as options of
`retreever train`. Every variant is scored after its last step and at its best look at validation, and with the mean of
its weights over the last third of the looks; trees also under budgets and over all leaves. Results so far are written
after every group of runs, and variants that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import tomllib
from typing import Any

import torch

from retreever import ReTreever
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.tasks.seeds import derive_seed
from retreever.train.engine import Trainer
from retreever.train.score import evaluate

BUDGETS = (14, 28)


def recipes(file: pathlib.Path) -> dict[str, Recipe]:
    """Name and seed -> recipe."""
    sweep = tomllib.loads(file.read_text(encoding="utf-8"))
    shared = sweep.get("settings", {})
    return {
        f"{name}, seed {seed}": make_recipe(sweep["task"], **{**shared, **changes, "seed": seed})
        for name, changes in sweep["variants"].items()
        for seed in sweep.get("seeds", [0])
    }


class Averaged:
    """A trainer and the mean of its weights over the last third of its looks at validation."""

    def __init__(self, recipe: Recipe, task: Any, device: str) -> None:
        torch.manual_seed(derive_seed(recipe.task.name, "init", recipe.train.seed))
        self.trainer = Trainer(recipe.make_model(), task, recipe.train, device)
        self.mean: dict[str, torch.Tensor] = {}
        self.looks = 0

    def settle(self) -> None:
        """Look at the steps so far; count the weights in if it is time."""
        trainer, before = self.trainer, len(self.trainer.history)
        trainer.settle()
        if len(trainer.history) == before or trainer.step < 2 / 3 * trainer.config.steps:
            return
        self.looks += 1
        with trainer.working():
            for name, value in trainer.model.state_dict().items():
                mean = self.mean.setdefault(name, torch.zeros_like(value))
                mean += (value - mean) / self.looks

    def scores(self) -> dict[str, Any]:
        """Validation scores of the last weights and their mean, under all readings."""
        trainer, batches = self.trainer, list(self.trainer.task.validation())
        found: dict[str, Any] = {
            "best": max(record.metric for record in trainer.history),
            "best_step": max(trainer.history, key=lambda record: record.metric).step,
            "last": trainer.history[-1].metric,
            "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
            "seconds": round(trainer.seconds, 1),
            "curve": [[record.step, round(record.metric, 3)] for record in trainer.history],
        }
        averaged = copy.deepcopy(trainer.model)
        averaged.load_state_dict(self.mean or averaged.state_dict())
        for name, model in {"last": trainer.model, "mean": averaged}.items():
            found[name] = evaluate(model, trainer.task, batches, trainer.device)
            if isinstance(model, ReTreever):
                for budget in BUDGETS:
                    model.set_reading(budget=budget)
                    found[f"{name}, budget {budget}"] = evaluate(model, trainer.task, batches, trainer.device)
                model.set_reading("full")
                found[f"{name}, full"] = evaluate(model, trainer.task, batches, trainer.device)
                model.set_reading()
        return found


def train(group: dict[str, Recipe], tasks: dict[Any, Any], data: pathlib.Path | None, device: str) -> dict[str, Any]:
    """Train recipes side by side and return their scores."""
    runs = {}
    for name, recipe in group.items():
        task = tasks.setdefault(recipe.task, recipe.task.make(data))
        runs[name] = Averaged(recipe, task, device)
    while active := [run for run in runs.values() if not run.trainer.done]:
        for run in active:
            run.trainer.launch()
        for run in active:
            if run.trainer.due:
                run.settle()
    return {name: {**run.scores(), "settings": group[name].to_json()} for name, run in runs.items()}


def main() -> None:
    """Train what is missing and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--steps", type=int, help="fewer steps, for a trial")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/sweep.json"))
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = {name: recipe for name, recipe in recipes(options.file).items() if name not in found}
    if options.steps:
        few = {"steps": options.steps, "warmup": options.steps // 10, "evaluate_every": max(1, options.steps // 4)}
        wanted = {name: recipe.changed(**few) for name, recipe in wanted.items()}
    tasks: dict[Any, Any] = {}
    names = list(wanted)
    every = options.at_once if options.device.startswith("cuda") else 1
    for start in range(0, len(names), every):
        found |= train(
            {name: wanted[name] for name in names[start : start + every]}, tasks, options.data, options.device
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, scores in sorted(found.items()):
        shown = {key: f"{value:.2f}" for key, value in scores.items() if isinstance(value, float) and key != "seconds"}
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}")


if __name__ == "__main__":
    main()
