"""Whether Triton can be had; free of importing it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def triton_installed() -> bool:
    """Whether kernels can be had on CUDA."""
    return find_spec("triton") is not None
