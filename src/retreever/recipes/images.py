"""Image completion (paper, section 4.2.2): EMNIST digits and CelebA faces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from retreever.recipes.points import RegressionSettings

if TYPE_CHECKING:
    from retreever.recipes.build import TestableTask
    from retreever.tasks.celeba import CelebATask
    from retreever.tasks.images import EmnistTask

SMALL = {
    "steps": 300, "batch": 8, "warmup": 30, "layers": 2, "evaluate_every": 100, "save_every": 300, "sizes": "batch",
}  # fmt: skip
PUBLISHED = {"lr": 5e-4, "warmup": 0, "batch": 100, "clip": 0.0, "precision": "fp32", "sizes": "batch"}


@dataclass(frozen=True)
class EmnistSettings(RegressionSettings):
    """One run on EMNIST: trained on digits, tested on other digits and on letters never seen."""

    steps: int = 48_000
    batch: int = 100
    lr: float = 1e-3
    warmup: int = 1_000
    evaluate_every: int = 2_000
    save_every: int = 2_000

    task: ClassVar[str] = "emnist"
    metric: ClassVar[str] = "log-likelihood"
    dim_x: ClassVar[int] = 2
    head: ClassVar[Any] = "bounded"
    largest: ClassVar[int] = 197
    small: ClassVar[dict[str, Any]] = SMALL
    published: ClassVar[dict[str, Any]] = PUBLISHED | {"steps": 48_000, "order": "axis", "axis": 0}

    def make_task(self, data: Path | None) -> EmnistTask:
        """Digits."""
        from retreever.tasks.catalogue import find_data
        from retreever.tasks.images import EmnistTask

        return EmnistTask(find_data("emnist", data), sizes=self.sizes)

    def make_tests(self, data: Path | None) -> dict[str, TestableTask]:
        """Digits, and classes never seen."""
        from retreever.tasks.catalogue import find_data
        from retreever.tasks.images import EmnistTask

        path = find_data("emnist", data)
        return {"seen": EmnistTask(path), "unseen": EmnistTask(path, classes="unseen")}


@dataclass(frozen=True)
class CelebASettings(RegressionSettings):
    """One run on CelebA faces."""

    steps: int = 100_000
    batch: int = 100
    lr: float = 1e-3
    warmup: int = 1_000
    evaluate_every: int = 5_000
    save_every: int = 5_000
    size: int = 32
    """Height and width of the images."""

    task: ClassVar[str] = "celeba"
    metric: ClassVar[str] = "log-likelihood"
    dim_x: ClassVar[int] = 2
    dim_y: ClassVar[int] = 3
    largest: ClassVar[int] = 197
    small: ClassVar[dict[str, Any]] = SMALL
    published: ClassVar[dict[str, Any]] = PUBLISHED | {"steps": 365_400, "order": "axis", "axis": 1}

    @property
    def variant(self) -> str:
        """Size and model."""
        return f"{self.size}-{super().variant}"

    def make_task(self, data: Path | None) -> CelebATask:
        """Faces."""
        from retreever.tasks.catalogue import find_data
        from retreever.tasks.celeba import CelebATask, TrainOn

        train_on: TrainOn = "train+validation" if self.preset == "paper" else "train"
        return CelebATask(find_data("celeba", data), size=self.size, train_on=train_on, sizes=self.sizes)
