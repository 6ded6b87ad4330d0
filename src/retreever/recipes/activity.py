"""Human Activity (paper, section 4.2.3): which activity, at each of 50 moments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retreever.recipes.points import PointSettings
from retreever.recipes.settings import Order

if TYPE_CHECKING:
    from retreever.tasks.activity import ActivityTask


@dataclass(frozen=True)
class ActivitySettings(PointSettings):
    """One run on windows of four body tags' positions."""

    steps: int = 6_000
    batch: int = 64
    lr: float = 1e-3
    warmup: int = 500
    evaluate_every: int = 500
    save_every: int = 500
    dropout: float = 0.1
    """Dropout of all models."""
    order: Order = "given"
    """How tokens are laid on the leaves; time points come in order."""
    split: Literal["paper", "recording"] = "paper"
    """The paper's split, which leaks, or one that shares no recording."""
    reward: Literal["accuracy", "cross-entropy"] = "accuracy"
    """What the tree search is rewarded for."""

    task: ClassVar[str] = "activity"
    metric: ClassVar[str] = "accuracy in %"
    dim_y: ClassVar[int] = 24
    outputs: ClassVar[int] = 11
    head: ClassVar[Any] = "categorical"
    natural_order: ClassVar[Order] = "given"
    largest: ClassVar[int] = 50
    small: ClassVar[dict[str, Any]] = {
        "steps": 400, "batch": 32, "warmup": 40, "layers": 2, "evaluate_every": 100, "save_every": 400,
        "dropout": 0.0,
    }  # fmt: skip
    published: ClassVar[dict[str, Any]] = {
        "lr": 5e-4, "warmup": 0, "steps": 17_000, "batch": 256, "clip": 0.0, "dropout": 0.0, "precision": "fp32",
    }  # fmt: skip

    @property
    def variant(self) -> str:
        """Split, model and reward."""
        reward = "-ce" if self.model == "retreever" and self.reward == "cross-entropy" else ""
        return f"{self.split}-{super().variant}{reward}"

    def make_task(self, data: Path | None) -> ActivityTask:
        """Windows of the official file."""
        from retreever.tasks.activity import ActivityTask
        from retreever.tasks.catalogue import find_data

        return ActivityTask(find_data("person_activity", data), self.split)
