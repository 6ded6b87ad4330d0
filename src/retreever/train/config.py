"""Training settings. The defaults are what trained best on training seeds; see docs/defaults.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from retreever.arguments import check_bool, check_choice, check_int, check_number, reject

Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
        steps: optimiser steps.
        batch: sequences or tasks per step.
        lr: peak learning rate of Adam.
        betas: of Adam.
        warmup: steps over which the learning rate rises from 0; -1 takes an eighth of the steps, at most 500.
        schedule: "cosine" falls to 0 at the last step; "constant" stays.
        clip: largest gradient norm; 0 leaves gradients as they are.
        weight_decay: decoupled (AdamW).
        seed: of weights, data and sampled paths.
        evaluate_every: steps between looks at the validation set.
        stop_at: stop early once the validation metric reaches this.
        save_every: steps between checkpoints, for runs that have a folder.
        keep: checkpoints kept besides the best.
        precision: "tf32" lets GPUs multiply in TensorFloat32 (CPUs always use float32), "fp32" does not, "bf16" runs
            the forward pass in bfloat16; weights, losses and the optimiser are float32 in all three.
        graph: on a GPU, run the whole step as one CUDA graph where the task allows it.
        compile: let torch.compile fuse the loss first; takes one to two minutes, then steps are faster.
        deterministic: on a GPU, only kernels that repeat themselves to the bit, so that a resumed run does.
    """

    steps: int = 4_000
    batch: int = 128
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = -1
    schedule: Schedule = "cosine"
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0
    evaluate_every: int = 250
    stop_at: float | None = None
    save_every: int = 500
    keep: int = 2
    precision: Precision = "tf32"
    graph: bool = True
    compile: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every", "save_every", "keep"):
            check_int(name, getattr(self, name), 1)
        check_int("warmup", self.warmup, -1)
        if self.warmup < 0:
            object.__setattr__(self, "warmup", min(500, self.steps // 8))
        check_int("seed", self.seed, 0)
        check_choice("schedule", self.schedule, ("cosine", "constant"))
        check_choice("precision", self.precision, ("fp32", "tf32", "bf16"))
        for name in ("graph", "compile", "deterministic"):
            check_bool(name, getattr(self, name))
        for name in ("lr", "clip", "weight_decay"):
            check_number(name, getattr(self, name))
        if self.lr == 0:
            reject("lr", "a number > 0", self.lr)
        if self.stop_at is not None:
            check_number("stop_at", self.stop_at, minimum=-math.inf)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            reject("betas", "two numbers in [0, 1)", repr(self.betas))
        for beta in self.betas:
            check_number("betas", beta, below=1.0)

    def as_published(self) -> TrainConfig:
        """The optimiser of the paper's copy task: Adam at 5e-4 with betas (0.1, 0.999) and no warm-up."""
        return replace(self, lr=5e-4, betas=(0.1, 0.999), warmup=0, schedule="cosine", clip=1.0)
