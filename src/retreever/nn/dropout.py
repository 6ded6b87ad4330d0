"""Dropout that does not wait for its random numbers: on a CPU torch draws one for every element, in a single thread."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

STEPS = 1 << 16  # sixteen random bits decide an element, so probabilities come in steps of 1 / 65,536


class Dropout(nn.Module):
    """`nn.Dropout`; on a CPU four elements share one 64-bit draw from torch's generator.

    There the probability is `p` rounded to the nearest 1 / 65,536, and what is kept is scaled by exactly that.
    `fused = False` uses torch's own everywhere.
    """

    fused = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        if not self.training or self.p == 0:
            return x
        return drop(x, self.p) if self.fused else F.dropout(x, self.p)


def drop(x: Float[Tensor, "*b d"], p: float) -> Float[Tensor, "*b d"]:
    """Zero each element with probability `p` and scale the others so that the mean stays."""
    if p == 0:
        return x
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return x * keep(x.shape, p, x)


def keep(shape: tuple[int, ...], p: float, like: Tensor) -> Float[Tensor, "..."]:
    """What to multiply with: 0 with probability `p`, else 1 / (1 - p)."""
    if not like.is_cpu:
        return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p).div_(1 - p)
    kept = like.new_empty(shape)
    threshold = round(p * STEPS)
    words = torch.empty(-(-kept.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # every bit is random
    bits = words.view(torch.int16)[: kept.numel()].view(shape)
    torch.ge(bits, threshold - STEPS // 2, out=kept)  # a comparison may write any type, and this takes half the time
    return kept.mul_(STEPS / (STEPS - threshold))
