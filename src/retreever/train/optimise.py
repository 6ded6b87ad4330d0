"""Optimiser, learning rate and numerical precision of a training step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from retreever.train.config import TrainConfig
from retreever.train.protocols import Model


def make_optimiser(model: Model, config: TrainConfig, graphed: bool = False) -> torch.optim.AdamW:
    """Adam with decoupled weight decay. In a CUDA graph the learning rate is a tensor, to be filled before a step."""
    device = next(model.parameters()).device
    rate = torch.zeros((), device=device) if graphed else config.lr
    return torch.optim.AdamW(
        model.parameters(),
        lr=rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=graphed,
    )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(config: TrainConfig, step: int) -> float:
    """Fraction of the peak rate at `step` (0-based): linear warm-up, then cosine to 0 or constant."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """Products in TensorFloat32 where wanted, deterministic kernels where wanted; as they were afterwards."""
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The forward pass in bfloat16 where wanted."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
