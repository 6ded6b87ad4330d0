"""`retreever train` and `retreever eval`: what can be said on the command line. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from retreever.arguments import check_int, reject
from retreever.recipes.activity import ActivitySettings
from retreever.recipes.copy import CopySettings
from retreever.recipes.gp import GPSettings
from retreever.recipes.images import CelebASettings, EmnistSettings
from retreever.recipes.settings import Settings

RECIPES: dict[str, type[Settings]] = {
    kind.task: kind for kind in (CopySettings, GPSettings, EmnistSettings, CelebASettings, ActivitySettings)
}


@dataclass(frozen=True)
class Where:
    """Where runs train and where their files go."""

    out: Path = Path("runs")
    """Where run folders go."""
    data: Path | None = None
    """Folder that holds the datasets; without it RETREEVER_DATA, or the default `retreever data list` shows."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    at_once: int = 16
    """Runs that train side by side on a GPU; on a CPU they go one after another."""
    resume: bool = False
    """Go on with runs that were stopped."""
    overwrite: bool = False
    """Replace runs of the same name."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folders."""


@dataclass(frozen=True)
class Launch(Where):
    """A recipe from the command line; mixed into the settings of one."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, data and sampled paths; one run each, side by side on a GPU."""

    task: ClassVar[str]

    def run(self) -> None:
        """Do it."""
        from retreever.recipes.command import train

        for seed in self.seeds:
            check_int("seeds", seed, 0)
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            reject("seeds", "one or more different seeds", self.seeds)
        train(self.settings(), self)

    def settings(self) -> list[Settings]:
        """One for each seed."""
        recipe = RECIPES[self.task]
        shared = {f.name: getattr(self, f.name) for f in fields(recipe)}
        return [recipe(**{**shared, "seed": seed}).resolved() for seed in self.seeds]


@dataclass(frozen=True)
class TrainCopy(Launch, CopySettings):
    """Repeat a sequence backwards: cross attention and tree cross attention without an encoder."""


@dataclass(frozen=True)
class TrainGP(Launch, GPSettings):
    """Regression on functions drawn from Gaussian processes."""


@dataclass(frozen=True)
class TrainEmnist(Launch, EmnistSettings):
    """Completion of EMNIST digits."""


@dataclass(frozen=True)
class TrainCelebA(Launch, CelebASettings):
    """Completion of CelebA faces."""


@dataclass(frozen=True)
class TrainActivity(Launch, ActivitySettings):
    """Which activity a person is at, from the positions of four body tags."""


@dataclass(frozen=True)
class EvaluateRun:
    """Score a trained run on its test set, or the exact posterior: `retreever eval gp --model oracle`."""

    what: Positional[Path | None] = None
    """Folder of a run, or gp."""
    checkpoint: Literal["best", "last"] = "best"
    """Which weights: those that did best on validation, or the newest."""
    data: Path | None = None
    """Folder that holds the datasets."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    model: Literal["trained", "oracle"] = "trained"
    """oracle is the exact posterior of a Gaussian process that knows its hyperparameters."""
    kernel: Literal["rbf", "matern", "periodic"] = "rbf"
    """Of the oracle."""

    oracles: ClassVar[tuple[str, ...]] = ("gp",)

    def run(self) -> int:
        """Do it; 0, as nothing is compared."""
        from retreever.recipes.command import evaluate_oracle, evaluate_run

        if self.what is None:
            reject("what", "the folder of a run, or --pretrained NAME", "none")
        if self.model == "oracle":
            if str(self.what) not in self.oracles:
                reject("what", "gp, the task whose exact posterior is known", repr(str(self.what)))
            evaluate_oracle(self.kernel)
        else:
            evaluate_run(self.what, self.checkpoint, self.data, self.device)
        return 0
