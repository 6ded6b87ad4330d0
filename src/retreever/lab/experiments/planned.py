"""A run that a table needs: its settings, its name, and the comparison with a run folder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from retreever.lab.experiments.keys import KINDS, Keys
from retreever.lab.recipes.recipe import Recipe, setting_types
from retreever.lab.recipes.tasks import TASKS
from retreever.train.config import TrainConfig

COMPUTED = {"random-guess": "copy", "exact-posterior": "gp"}  # rows without training -> their task
HOW = {f.name for f in fields(TrainConfig)}  # settings of the training, not of model or task


@dataclass(frozen=True)
class PlannedRun:
    """A run; `changes` are the settings the recipe file gives, `computed` names a row without training."""

    recipe: Recipe
    changes: dict[str, Any]
    computed: str = ""

    @property
    def name(self) -> str:
        """Name of the run's folder and of its result."""
        if not self.computed:
            return self.recipe.name
        marks = [f"{key}{value}" for key, value in self.changes.items() if key not in HOW]
        return "-".join([self.recipe.task.name, *marks, self.computed, f"seed{self.recipe.train.seed}"])

    def config(self) -> dict[str, Any]:
        """The config.json of the run's folder."""
        if not self.computed:
            return self.recipe.to_json()
        changes = {key: value for key, value in self.changes.items() if key not in HOW}
        own = {"task": self.recipe.task.name, "model": self.computed, "preset": self.recipe.preset}
        return {**own, **changes, "seed": self.recipe.train.seed}

    def differs(self, config: dict[str, Any]) -> list[str]:
        """Settings of model and task in which `config` differs from this run; training settings are not compared."""
        wanted = {key: value for key, value in self.config().items() if key in self.changes and key not in HOW}
        wanted |= {"task": self.recipe.task.name, "seed": self.recipe.train.seed, "preset": self.recipe.preset}
        return [key for key, value in wanted.items() if config.get(key) != value]


def checked_settings(task: str, changes: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """`changes` with numbers in the type of their field; raises `ConfigError` for unknown names and values."""
    if not task:
        keys.refuse("task", "one of " + ", ".join(TASKS), "nothing")
    known = {name: kind for name, kind in setting_types(task).items() if name != "seed"}
    return {name: _checked(name, value, known, task, keys) for name, value in changes.items()}


def _checked(name: str, value: Any, known: dict[str, Any], task: str, keys: Keys) -> Any:
    if name not in known:
        keys.refuse(name, f"a setting of {task} ({', '.join(known)})", "another")
    hint = known[name]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            keys.refuse(name, "one of " + ", ".join(map(str, get_args(hint))), repr(value))
        return value
    if get_origin(hint) is tuple:
        return tuple(Keys({name: value}, keys.file, keys.where).take(name, list))
    kind = next((k for k in get_args(hint) or (hint,) if k in KINDS), str)
    checked = Keys({name: value}, keys.file, keys.where).take(name, kind)
    return float(checked) if kind is float else checked
