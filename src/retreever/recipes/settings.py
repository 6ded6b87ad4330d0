"""What all recipes can be told. Free of torch; the settings of a run are saved as JSON in its folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from tyro.conf import Suppress

from retreever.errors import ConfigError
from retreever.train.config import TrainConfig

if TYPE_CHECKING:
    from retreever.recipes.build import AnyModel, TestableTask

Order = Literal["given", "axis", "kd", "kd-widest", "ball", "random", "projection"]


@dataclass(frozen=True)
class Settings(TrainConfig, ABC):
    """One run: what is trained, and how. Subclasses, one per task, say how task and model are made."""

    branch: int = 2
    """Children per tree node."""
    latents: int = 0
    """Latents of Perceiver IO; 0 takes as many as the tree reads tokens."""
    lambda_rl: float = 1.0
    """Weight of the policy's loss."""
    lambda_ca: float = 1.0
    """Weight of the loss read over all leaves."""
    gate: Literal["leaves", "open"] = "leaves"
    """For classes, train the search as far as reading all leaves has come, or from the start."""
    detours: float = 0.0
    """Share of the queries that make one decision of the search at random while training."""
    preset: Literal["default", "paper"] = "default"
    """This library's choices, or those of the paper's public code (its optimiser settings too)."""
    quick: bool = False
    """A small model and few steps, for a look within a minute on a CPU; settings given by hand stay."""
    seed: Suppress[int] = 0

    task: ClassVar[str]
    metric: ClassVar[str]
    small: ClassVar[dict[str, Any]]  # what --quick sets
    published: ClassVar[dict[str, Any]]  # what --preset paper sets

    def __post_init__(self) -> None:
        """Checked when used: an error raised while arguments are parsed would not be one line."""

    def resolved(self) -> Self:
        """With `quick` and `preset` put into effect wherever a setting still has its default."""
        published: dict[str, Any] = {"gate": "open", "detours": 0.0} | self.published
        changes = (published if self.preset == "paper" else {}) | (self.small if self.quick else {})
        return replace(self, **{name: value for name, value in changes.items() if self._is_default(name)})

    def train_config(self) -> TrainConfig:
        """The training settings alone, checked."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})

    @property
    @abstractmethod
    def variant(self) -> str:
        """The part of the run's name that says what differs from the recipe's defaults."""

    @property
    def name(self) -> str:
        """Of the run's folder."""
        marks = [self.task, self.variant, "paper" if self.preset == "paper" else "", "quick" if self.quick else ""]
        return "-".join([mark for mark in marks if mark] + [f"seed{self.seed}"])

    @abstractmethod
    def make_task(self, data: Path | None) -> TestableTask:
        """The task, to train on and to steer by."""

    def make_tests(self, data: Path | None) -> dict[str, TestableTask]:
        """What a trained model is tested on, the main test first."""
        return {"test": self.make_task(data)}

    @abstractmethod
    def make_model(self) -> AnyModel:
        """The model, freshly initialised."""

    @property
    @abstractmethod
    def context(self) -> int:
        """The largest context, which the paper's token percentages refer to."""

    def to_json(self) -> dict[str, Any]:
        """The settings, as saved in the run's folder."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"task": self.task, **own, "betas": list(self.betas)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """Settings back from a run folder."""
        rest = {key: value for key, value in saved.items() if key != "task"}
        try:
            return cls(**{**rest, "betas": tuple(rest["betas"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json: expected the settings of a {cls.task} run, got {error}") from None

    def _is_default(self, name: str) -> bool:
        default = next(f.default for f in fields(self) if f.name == name)
        return default is not MISSING and getattr(self, name) == default
