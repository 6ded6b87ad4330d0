"""GP regression (paper, section 4.2.1): trained on RBF functions, tested on RBF and Matern 5/2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retreever.recipes.points import RegressionSettings

if TYPE_CHECKING:
    from retreever.recipes.build import TestableTask
    from retreever.tasks.gp import GPTask


@dataclass(frozen=True)
class GPSettings(RegressionSettings):
    """One run on functions drawn from Gaussian processes."""

    steps: int = 50_000
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 1_000
    evaluate_every: int = 2_500
    save_every: int = 2_500
    kernel: Literal["rbf", "matern", "periodic"] = "rbf"
    """Of the functions trained on."""
    ranges: Literal["code", "paper"] = "code"
    """Length-scales as in the code behind the paper's numbers, or as printed in the paper."""

    task: ClassVar[str] = "gp"
    metric: ClassVar[str] = "log-likelihood"
    largest: ClassVar[int] = 47
    small: ClassVar[dict[str, Any]] = {
        "steps": 600, "batch": 16, "warmup": 50, "layers": 2, "evaluate_every": 200, "save_every": 600,
        "sizes": "batch",
    }  # fmt: skip
    published: ClassVar[dict[str, Any]] = {
        "lr": 5e-4, "warmup": 0, "steps": 100_000, "batch": 16, "precision": "fp32", "sizes": "batch",
    }  # fmt: skip

    @property
    def variant(self) -> str:
        """Kernel and model."""
        ranges = "-printed" if self.ranges == "paper" else ""
        return f"{self.kernel}{ranges}-{super().variant}"

    def make_task(self, data: Path | None = None) -> GPTask:
        """Functions of `kernel`."""
        from retreever.tasks.gp import GPTask

        return GPTask(self.kernel, self.ranges, sizes=self.sizes)

    def make_tests(self, data: Path | None = None) -> dict[str, TestableTask]:
        """RBF and Matern 5/2, and the kernel trained on if it is another."""
        from retreever.tasks.gp import GPTask, Kernel

        kernels: tuple[Kernel, ...] = ("rbf", "matern")
        names = kernels if self.kernel in kernels else (self.kernel, *kernels)
        return {kernel: GPTask(kernel, self.ranges) for kernel in names}
