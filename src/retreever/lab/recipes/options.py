"""Command line arguments of `retreever train`. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import subcommand as named

from retreever.arguments import check_int, reject
from retreever.lab.recipes.models import ModelSettings, SearchSettings, check_used
from retreever.lab.recipes.recipe import PRESETS, Preset, Recipe, compose
from retreever.lab.recipes.tasks import TASKS
from retreever.train.config import TrainConfig


@dataclass(frozen=True)
class Where:
    """Where runs train and where their files go."""

    out: Path = Path("runs")
    """Folder for run folders."""
    data: Path | None = None
    """Folder that holds the datasets; without it RETREEVER_DATA, or the default `retreever data list` shows."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    at_once: int = 16
    """Runs that train side by side on a GPU; on a CPU they go one after another."""
    resume: bool = False
    """Resume runs that were stopped."""
    overwrite: bool = False
    """Replace runs of the same name."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folders."""


@dataclass(frozen=True)
class Launch:
    """Arguments of all tasks. Settings given by hand override --quick, which overrides --preset."""

    model: ModelSettings = field(default_factory=ModelSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    where: Where = field(default_factory=Where)
    preset: Preset = "default"
    """This library's choices, or those of the paper's public code (its optimiser settings too)."""
    quick: bool = False
    """A small model and few steps: about a minute on a CPU, four for banp."""
    seeds: tuple[int, ...] = ()
    """Seeds of weights, data and sampled paths, one run each, side by side on a GPU; none means --seed alone."""

    def run(self) -> None:
        """Train one run per seed."""
        from retreever.lab.recipes.command import train

        for seed in self.seeds:
            check_int("seeds", seed, 0)
        if len(set(self.seeds)) != len(self.seeds):
            reject("seeds", "one or more different seeds", self.seeds)
        task: Any = self.task  # type: ignore[attr-defined]
        usual = compose(task.name, self.preset, self.quick, {"model": self.model.model})
        check_used(self.model, self.search, (usual.model, usual.search))
        train(self.recipes(), self.where)

    def recipes(self) -> list[Recipe]:
        """One recipe for each seed."""
        task: Any = self.task  # type: ignore[attr-defined]
        recipe = Recipe(task, self.model, self.search, self.train, self.preset, self.quick).resolved()
        return [recipe.changed(seed=seed) for seed in self.seeds or (self.train.seed,)]


def train_commands(words: Sequence[str]) -> Any:
    """The union of all `retreever train` commands, one per task.

    Their defaults are those of --preset, --quick and --model in `words`, so that other arguments override them, and
    --help shows the settings that would run.
    """
    preset: Preset = asked(words, "--preset", PRESETS) or "default"
    quick = "--quick" in words
    union: Any = None
    for name, task in TASKS.items():
        model = asked(words, "--model", task.models)
        recipe = compose(name, preset, quick, {"model": model} if model else {})
        space = {"__doc__": task.__doc__}
        launch: Any = make_dataclass(
            name, [("task", task)], bases=(Launch,), namespace=space, frozen=True, kw_only=True
        )
        parts = {part: getattr(recipe, part) for part in ("task", "model", "search", "train")}
        command = Annotated[launch, named(name, default=launch(**parts, preset=preset, quick=quick), prefix_name=False)]
        union = command if union is None else union | command
    return union


def asked(words: Sequence[str], option: str, choices: Sequence[Any]) -> Any:
    """The choice of `option` in the words of a command line, or None; unknown ones are refused when they are parsed."""
    values = [after for word, after in pairwise([*words, ""]) if word == option]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return next((choice for choice in choices if choice in values), None)
