"""A recipe: settings of a task, a model, its search and its training. Does not import torch.

In files and on the command line a recipe is flat: every setting has its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from retreever.arguments import check_bool, check_choice, reject
from retreever.errors import ConfigError
from retreever.lab.recipes.defaults import DEFAULTS, defaults
from retreever.lab.recipes.models import (
    NEURAL_PROCESSES,
    SERIES,
    ModelSettings,
    SearchSettings,
    make_model,
    make_neural_process,
    make_series_model,
    model_mark,
)
from retreever.lab.recipes.tasks import TASKS, TaskSettings
from retreever.train.config import TrainConfig

if TYPE_CHECKING:  # torch is imported only when a model is made
    from retreever.models.base import Model

FORMAT = 2  # of config.json; version 0.1 wrote no number
LATER: dict[str, Any] = {"budget": None, "state": 0, "solver": "fixed", "crop": 0}  # not in older runs of this format
Preset = Literal["default", "paper"]
PRESETS: tuple[Preset, ...] = get_args(Preset)


@dataclass(frozen=True)
class Recipe:
    """All settings of one run; made by `make_recipe`."""

    task: TaskSettings
    model: ModelSettings = field(default_factory=ModelSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    preset: Preset = "default"
    quick: bool = False

    def __post_init__(self) -> None:
        model, models = self.model.model, self.task.models
        if model not in models:
            reject("model", f"a model of the {self.task.name} task, one of {', '.join(models)}", repr(model))
        check_choice("preset", self.preset, PRESETS)
        check_bool("quick", self.quick)

    def resolved(self) -> Recipe:
        """The recipe with `residual` "auto" replaced by the form for its model."""
        if self.model.residual != "auto":
            return self
        residual: Any = "pre" if self.model.model in ("perceiver-io", "lbanp") else "normalised"
        return replace(self, model=replace(self.model, residual=residual))

    @property
    def name(self) -> str:
        """Name of the run's folder: task, model, seed and settings that differ from the defaults."""
        variant = model_mark(self.model, self.search, DEFAULTS[self.task.name].get("order", "kd"))
        special = ["paper"] * (self.preset == "paper") + ["quick"] * self.quick
        marks = [self.task.name, self.task.mark, variant, *special, f"seed{self.train.seed}"]
        return "-".join(mark for mark in marks if mark)

    def make_model(self) -> Model:
        """The model, freshly initialised."""
        if self.model.model in NEURAL_PROCESSES:
            return make_neural_process(self.model, self.task.model_fields, self.task.depths)
        if self.model.model in SERIES:
            return make_series_model(self.model, self.task.model_fields)
        paper = self.preset == "paper"
        return make_model(self.model, self.search, self.task.model_fields, self.task.context, paper)

    def changed(self, **given: Any) -> Recipe:
        """The recipe with some settings changed, by their names."""
        _check_known(self.task.name, given)
        parts: dict[str, Any] = {name: getattr(self, name) for name in _parts(self.task.name)}
        return replace(self, **{name: replace(part, **_fields(part, given)) for name, part in parts.items()})

    def to_json(self) -> dict[str, Any]:
        """All settings, flat, as saved in the run's folder."""
        parts = (self.task, self.model, self.search, self.train)
        values = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
        values |= {"betas": list(self.train.betas), "preset": self.preset, "quick": self.quick}
        return {"format": FORMAT, "task": self.task.name, **values}


def make_recipe(task: str, preset: Preset = "default", quick: bool = False, **given: Any) -> Recipe:
    """The recipe of `task`: its defaults, changed by `preset` and `quick`, then by the settings in `given`."""
    return compose(task, preset, quick, given).resolved()


def compose(task: str, preset: Preset, quick: bool, given: dict[str, Any]) -> Recipe:
    """`make_recipe` without resolving "auto": the command line parses the model after its defaults are made."""
    check_choice("task", task, tuple(TASKS))
    check_choice("preset", preset, PRESETS)
    _check_known(task, given)
    values = defaults(task, preset, quick, given.get("model", "")) | given
    parts = {name: kind(**_fields(kind, values)) for name, kind in _parts(task).items()}
    return Recipe(**parts, preset=preset, quick=quick)


def recipe_from_json(saved: dict[str, Any]) -> Recipe:
    """The recipe in the config.json of a run; in version 0.1 it had no format and lacked some settings."""
    task = saved.get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigError(f"config.json: expected a task of {', '.join(TASKS)}, got {task!r}")
    if saved.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"config.json: format: expected {FORMAT}, got {saved['format']!r}")
    later = {name: value for name, value in LATER.items() if name in setting_names(task)}
    values = later | {key: value for key, value in saved.items() if key not in ("format", "task")}
    if "format" in saved:
        for name in setting_names(task):
            if name not in values:
                raise ConfigError(f"config.json: {name}: expected a setting, got none")
    try:
        return make_recipe(task, **values | {"betas": tuple(values["betas"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json: expected the settings of a {task} run, got {error}") from None


def setting_names(task: str) -> list[str]:
    """Names of all settings of a task's recipe, in their order, without preset and quick."""
    return [f.name for kind in _parts(task).values() for f in fields(kind)]


def setting_types(task: str) -> dict[str, Any]:
    """The type of every setting of a task's recipe, with preset and quick."""
    found: dict[str, Any] = {"preset": Preset, "quick": bool}
    for kind in _parts(task).values():
        hints = get_type_hints(kind)
        found |= {f.name: hints[f.name] for f in fields(kind)}
    return found


def _check_known(task: str, given: dict[str, Any]) -> None:
    known = setting_names(task)
    for name in given:
        if name not in known:
            reject(name, f"a setting of {task} ({', '.join(known)})", "another")


def _parts(task: str) -> dict[str, Any]:
    return {"task": TASKS[task], "model": ModelSettings, "search": SearchSettings, "train": TrainConfig}


def _fields(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}
