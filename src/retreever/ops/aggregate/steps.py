"""Where the nodes of one way up a tree lie: numbers that all kernels of such a way read from the device."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from retreever.tree.plan import TreePlan

Steps = Int[Tensor, " levels"]


@lru_cache(maxsize=64)
def steps_of(plan: TreePlan, device: torch.device) -> tuple[Steps, Steps]:
    """Slots under a node and first row of every level, from the leaves up, on the device."""
    with torch.inference_mode(False):
        powers = [plan.branch**height for height in range(plan.depth + 1)]
        return torch.tensor(powers, device=device), torch.tensor(plan.offsets[:0:-1], device=device)
