"""Copy task (paper, section 4.1): no encoder, cross attention against tree cross attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retreever.recipes.settings import Settings

if TYPE_CHECKING:
    from retreever.recipes.build import AnyModel
    from retreever.tasks.copy import CopyTask


@dataclass(frozen=True)
class CopySettings(Settings):
    """One run on the copy task."""

    steps: int = 4_000
    batch: int = 64
    evaluate_every: int = 500
    save_every: int = 1_000
    n: int = 256
    """Length of the sequences, a power of two; half of it is context."""
    model: Literal["tca", "ca", "perceiver-io"] = "tca"
    """Tree cross attention, cross attention over all tokens, or Perceiver IO."""
    reward: Literal["accuracy", "cross-entropy"] = "accuracy"
    """What the tree search is rewarded for."""
    dropout: float = 0.1
    """Dropout of all models."""
    detours: float = 0.1
    """Share of the queries that make one decision of the search at random while training."""

    task: ClassVar[str] = "copy"
    metric: ClassVar[str] = "accuracy in %"
    small: ClassVar[dict[str, Any]] = {"n": 32, "steps": 600, "batch": 64, "warmup": 50, "evaluate_every": 100}
    published: ClassVar[dict[str, Any]] = {
        "lr": 5e-4, "betas": (0.1, 0.999), "warmup": 0, "steps": 100_000, "precision": "fp32",
    }  # fmt: skip

    @property
    def variant(self) -> str:
        """Length, model and reward."""
        reward = "-ce" if self.model == "tca" and self.reward == "cross-entropy" else ""
        branch = f"-branch{self.branch}" if self.branch != 2 else ""
        latents = f"-{self.latents}" if self.latents else ""
        weights = "".join(f"-{k}{v:g}" for k, v in (("rl", self.lambda_rl), ("ca", self.lambda_ca)) if v != 1)
        return f"{self.n}-{self.model}{latents}{reward}{branch}{weights}"

    def make_task(self, data: Path | None = None) -> CopyTask:
        """Sequences of length n."""
        from retreever.tasks.copy import CopyTask

        return CopyTask(self.n)

    def make_model(self) -> AnyModel:
        """Cross attention, tree cross attention or Perceiver IO."""
        from retreever.recipes.build import copy_model

        return copy_model(self.resolved())

    @property
    def context(self) -> int:
        """Half of a sequence."""
        return self.n // 2
