"""Tasks of the recipes: their settings, and how they are made. Importing this module does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from retreever.arguments import check_int
from retreever.data.catalogue import find_data
from retreever.lab.recipes.models import NEURAL_PROCESSES, POINT_MODELS, SERIES

Sizes = Literal["each", "batch"]


@dataclass(frozen=True)
class TaskSettings(ABC):
    """Settings of a task."""

    name: ClassVar[str]
    metric: ClassVar[str] = "log-likelihood"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS
    marks: ClassVar[tuple[str, ...]] = ()  # settings that identify a variant of the task
    model_fields: ClassVar[dict[str, Any]]  # settings of models that follow from the task
    depths: ClassVar[dict[str, int]] = {}  # of neural processes, where they differ from those of GP regression

    @property
    @abstractmethod
    def context(self) -> int:
        """The largest context, to which the paper's token percentages refer."""

    @property
    def mark(self) -> str:
        """The part of a run's name that identifies a variant of the task."""
        return "-".join(str(getattr(self, name)) for name in self.marks)

    @abstractmethod
    def make(self, data: Path | None, preset: str = "default") -> Any:
        """The task for training and validation."""

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """Tasks a trained model is tested on, the main test first."""
        return {"test": self.make(data)}


@dataclass(frozen=True)
class CopySettings(TaskSettings):
    """Sequences to repeat backwards (paper, section 4.1)."""

    n: int = 256
    """Length of the sequences, a power of two; half of it is context."""

    name: ClassVar[str] = "copy"
    marks: ClassVar[tuple[str, ...]] = ("n",)
    metric: ClassVar[str] = "accuracy in %"
    models: ClassVar[tuple[str, ...]] = ("tca", "ca", "perceiver-io")
    model_fields: ClassVar[dict[str, Any]] = {"dim_y": 12, "inputs": "sequence", "head": "categorical"}

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)

    @property
    def context(self) -> int:
        """Half of a sequence."""
        return self.n // 2

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Sequences of length n."""
        from retreever.tasks.copy import CopyTask

        return CopyTask(self.n)


@dataclass(frozen=True)
class GPSettings(TaskSettings):
    """Functions drawn from Gaussian processes (paper, section 4.2.1)."""

    kernel: Literal["rbf", "matern", "periodic"] = "rbf"
    """Kernel of the functions trained on."""
    ranges: Literal["code", "paper"] = "code"
    """Length-scales as in the code behind the paper's numbers, or as printed in the paper."""
    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "gp"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS + NEURAL_PROCESSES
    model_fields: ClassVar[dict[str, Any]] = {"dim_x": 1, "dim_y": 1, "head": "gaussian"}
    context: ClassVar[int] = 47

    @property
    def mark(self) -> str:
        """The kernel, and whether its ranges are those printed in the paper."""
        return self.kernel + ("-printed" if self.ranges == "paper" else "")

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Functions of `kernel`."""
        from retreever.tasks.gp import GPTask

        return GPTask(self.kernel, self.ranges, sizes=self.sizes)

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """RBF and Matern 5/2, and the kernel trained on if it is another."""
        from retreever.tasks.gp import GPTask, Kernel

        kernels: tuple[Kernel, ...] = ("rbf", "matern")
        names = kernels if self.kernel in kernels else (self.kernel, *kernels)
        return {kernel: GPTask(kernel, self.ranges) for kernel in names}


@dataclass(frozen=True)
class EmnistSettings(TaskSettings):
    """EMNIST: trained on digits, tested on other digits and on letters never seen (paper, section 4.2.2)."""

    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "emnist"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS + NEURAL_PROCESSES
    model_fields: ClassVar[dict[str, Any]] = {"dim_x": 2, "dim_y": 1, "head": "bounded"}
    depths: ClassVar[dict[str, int]] = {
        "pre_depth": 5, "post_depth": 3, "value_depth": 5, "key_depth": 3, "decoder_depth": 4,
    }  # fmt: skip
    context: ClassVar[int] = 197

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Digits."""
        from retreever.tasks.images import EmnistTask

        return EmnistTask(find_data("emnist", data), sizes=self.sizes)

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """Digits, and classes never seen."""
        from retreever.tasks.images import EmnistTask

        path = find_data("emnist", data)
        return {"seen": EmnistTask(path), "unseen": EmnistTask(path, classes="unseen")}


@dataclass(frozen=True)
class CelebASettings(TaskSettings):
    """CelebA faces (paper, section 4.2.2)."""

    size: int = 32
    """Height and width of the images."""
    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "celeba"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS + NEURAL_PROCESSES
    marks: ClassVar[tuple[str, ...]] = ("size",)
    model_fields: ClassVar[dict[str, Any]] = {"dim_x": 2, "dim_y": 3, "head": "gaussian"}
    depths: ClassVar[dict[str, int]] = {
        "pre_depth": 6, "post_depth": 3, "value_depth": 6, "key_depth": 3, "decoder_depth": 5,
    }  # fmt: skip
    context: ClassVar[int] = 197

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Faces; the paper's code trains on the validation images, too."""
        from retreever.tasks.celeba import CelebATask, TrainOn

        train_on: TrainOn = "train+validation" if preset == "paper" else "train"
        return CelebATask(find_data("celeba", data), size=self.size, train_on=train_on, sizes=self.sizes)


@dataclass(frozen=True)
class ActivitySettings(TaskSettings):
    """Human Activity: which activity, at each of 50 time points, from four body tags (paper, section 4.2.3)."""

    split: Literal["paper", "recording"] = "paper"
    """The paper's split, which leaks, or one that shares no recording."""
    crop: int = 0
    """Training windows lose up to so many of their 50 points, the first ones, at random."""

    name: ClassVar[str] = "activity"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS + SERIES
    metric: ClassVar[str] = "accuracy in %"
    model_fields: ClassVar[dict[str, Any]] = {"dim_x": 1, "dim_y": 24, "outputs": 11, "head": "categorical"}
    context: ClassVar[int] = 50

    @property
    def mark(self) -> str:
        """The split, and how far windows are cropped."""
        return self.split + (f"-crop{self.crop}" if self.crop else "")

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Windows of the official file."""
        from retreever.tasks.activity import ActivityTask

        return ActivityTask(find_data("person_activity", data), self.split, self.crop)


@dataclass(frozen=True)
class WheelSettings(TaskSettings):
    """Rewards of the five arms of wheel bandits; `retreever bench bandit` lets trained models play."""

    name: ClassVar[str] = "wheel"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS + NEURAL_PROCESSES
    model_fields: ClassVar[dict[str, Any]] = {"dim_x": 2, "dim_y": 5, "head": "floored", "heads": 1}
    depths: ClassVar[dict[str, int]] = {"pre_depth": 5, "post_depth": 3, "value_depth": 5, "key_depth": 3}
    context: ClassVar[int] = 512

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Problems of random radii."""
        from retreever.tasks.wheel import WheelTask

        return WheelTask()


_KINDS: tuple[type[TaskSettings], ...] = (
    CopySettings, GPSettings, EmnistSettings, CelebASettings, ActivitySettings, WheelSettings,
)  # fmt: skip
TASKS: dict[str, type[TaskSettings]] = {kind.name: kind for kind in _KINDS}
