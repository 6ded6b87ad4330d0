"""Whether Numba can be had; it is imported when first asked."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def numba_runs() -> bool:
    """Whether kernels can be compiled for a CPU."""
    try:
        import numba
    except ImportError:
        return False
    return not getattr(numba.config, "DISABLE_JIT", False)


def plain_floats(*tensors: Tensor) -> bool:
    """Whether kernels may read and write these: float32 in a CPU's memory, one after the other, and nobody looks on."""
    plain = all(
        type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and x.numel() > 0
        for x in tensors
    )
    return plain and numba_runs()
