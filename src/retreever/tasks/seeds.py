"""Random generators that never coincide: every (task, purpose, seed) has its own."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch

Purpose = Literal["train", "validation", "test", "init"]


def derive_seed(task: str, purpose: Purpose, seed: int) -> int:
    """A seed of 63 bits that is different for every (task, purpose, seed)."""
    digest = hashlib.sha256(f"{task}/{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(task: str, purpose: Purpose, seed: int) -> torch.Generator:
    """A CPU generator for one purpose of one task."""
    return torch.Generator().manual_seed(derive_seed(task, purpose, seed))


def integer(low: int, stop: int, generator: torch.Generator) -> int:
    """A uniform integer from low to stop - 1."""
    return int(torch.randint(low, stop, (), generator=generator, device=generator.device))
