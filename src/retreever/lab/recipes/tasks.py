"""The tasks of the recipes: what can be set about each, and how it is made. Free of torch until one is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

COPY_MODELS = ("tca", "ca", "perceiver-io")
POINT_MODELS = ("retreever", "transformer-ca", "perceiver-io")
Sizes = Literal["each", "batch"]


@dataclass(frozen=True)
class CopySettings:
    """Sequences to repeat backwards (paper, section 4.1)."""

    n: int = 256
    """Length of the sequences, a power of two; half of it is context."""

    name: ClassVar[str] = "copy"
    metric: ClassVar[str] = "accuracy in %"
    models: ClassVar[tuple[str, ...]] = COPY_MODELS

    @property
    def mark(self) -> str:
        """Of the run's name."""
        return str(self.n)

    @property
    def context(self) -> int:
        """The largest context, which the paper's token percentages refer to."""
        return self.n // 2

    def model_fields(self) -> dict[str, Any]:
        """What the task settles about models."""
        from retreever.tasks.copy import VOCABULARY

        return {"dim_y": VOCABULARY, "inputs": "sequence", "head": "categorical"}

    def make(self, data: Path | None = None, preset: str = "default") -> Any:
        """The task, to train on and to steer by."""
        from retreever.tasks.copy import CopyTask

        return CopyTask(self.n)

    def make_tests(self, data: Path | None = None) -> dict[str, Any]:
        """What a trained model is tested on, the main test first."""
        return {"test": self.make(data)}


@dataclass(frozen=True)
class GPSettings:
    """Functions drawn from Gaussian processes (paper, section 4.2.1)."""

    kernel: Literal["rbf", "matern", "periodic"] = "rbf"
    """Of the functions trained on."""
    ranges: Literal["code", "paper"] = "code"
    """Length-scales as in the code behind the paper's numbers, or as printed in the paper."""
    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "gp"
    metric: ClassVar[str] = "log-likelihood"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS
    context: ClassVar[int] = 47  # as the paper counts: one more than contexts ever have

    @property
    def mark(self) -> str:
        """Of the run's name."""
        return self.kernel + ("-printed" if self.ranges == "paper" else "")

    def model_fields(self) -> dict[str, Any]:
        """What the task settles about models."""
        return {"dim_x": 1, "dim_y": 1, "head": "gaussian"}

    def make(self, data: Path | None = None, preset: str = "default") -> Any:
        """Functions of `kernel`."""
        from retreever.tasks.gp import GPTask

        return GPTask(self.kernel, self.ranges, sizes=self.sizes)

    def make_tests(self, data: Path | None = None) -> dict[str, Any]:
        """RBF and Matern 5/2, and the kernel trained on if it is another."""
        from retreever.tasks.gp import GPTask, Kernel

        kernels: tuple[Kernel, ...] = ("rbf", "matern")
        names = kernels if self.kernel in kernels else (self.kernel, *kernels)
        return {kernel: GPTask(kernel, self.ranges) for kernel in names}


@dataclass(frozen=True)
class EmnistSettings:
    """EMNIST: trained on digits, tested on other digits and on letters never seen (paper, section 4.2.2)."""

    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "emnist"
    metric: ClassVar[str] = "log-likelihood"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS
    context: ClassVar[int] = 197
    mark: ClassVar[str] = ""

    def model_fields(self) -> dict[str, Any]:
        """What the task settles about models."""
        return {"dim_x": 2, "dim_y": 1, "head": "bounded"}

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Digits."""
        from retreever.data.catalogue import find_data
        from retreever.tasks.images import EmnistTask

        return EmnistTask(find_data("emnist", data), sizes=self.sizes)

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """Digits, and classes never seen."""
        from retreever.data.catalogue import find_data
        from retreever.tasks.images import EmnistTask

        path = find_data("emnist", data)
        return {"seen": EmnistTask(path), "unseen": EmnistTask(path, classes="unseen")}


@dataclass(frozen=True)
class CelebASettings:
    """CelebA faces (paper, section 4.2.2)."""

    size: int = 32
    """Height and width of the images."""
    sizes: Sizes = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""

    name: ClassVar[str] = "celeba"
    metric: ClassVar[str] = "log-likelihood"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS
    context: ClassVar[int] = 197

    @property
    def mark(self) -> str:
        """Of the run's name."""
        return str(self.size)

    def model_fields(self) -> dict[str, Any]:
        """What the task settles about models."""
        return {"dim_x": 2, "dim_y": 3, "head": "gaussian"}

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Faces; the paper's code trains on the validation images, too."""
        from retreever.data.catalogue import find_data
        from retreever.tasks.celeba import CelebATask, TrainOn

        train_on: TrainOn = "train+validation" if preset == "paper" else "train"
        return CelebATask(find_data("celeba", data), size=self.size, train_on=train_on, sizes=self.sizes)

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """What a trained model is tested on."""
        return {"test": self.make(data)}


@dataclass(frozen=True)
class ActivitySettings:
    """Windows of four body tags' positions: which activity, at each of 50 moments (paper, section 4.2.3)."""

    split: Literal["paper", "recording"] = "paper"
    """The paper's split, which leaks, or one that shares no recording."""

    name: ClassVar[str] = "activity"
    metric: ClassVar[str] = "accuracy in %"
    models: ClassVar[tuple[str, ...]] = POINT_MODELS
    context: ClassVar[int] = 50

    @property
    def mark(self) -> str:
        """Of the run's name."""
        return self.split

    def model_fields(self) -> dict[str, Any]:
        """What the task settles about models."""
        return {"dim_x": 1, "dim_y": 24, "outputs": 11, "head": "categorical"}

    def make(self, data: Path | None, preset: str = "default") -> Any:
        """Windows of the official file."""
        from retreever.data.catalogue import find_data
        from retreever.tasks.activity import ActivityTask

        return ActivityTask(find_data("person_activity", data), self.split)

    def make_tests(self, data: Path | None) -> dict[str, Any]:
        """What a trained model is tested on."""
        return {"test": self.make(data)}


TaskSettings = CopySettings | GPSettings | EmnistSettings | CelebASettings | ActivitySettings
TASKS: dict[str, type[TaskSettings]] = {
    kind.name: kind for kind in (CopySettings, GPSettings, EmnistSettings, CelebASettings, ActivitySettings)
}
