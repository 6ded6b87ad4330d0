"""The machine a benchmark ran on: processor, accelerator, versions, threads, load."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from retreever.version import __version__

_ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "NUMBA_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine and the software on it, ready for JSON."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": _accelerator(torch.device(device)),
        "system": platform.system(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "numba": version_of("numba"),
        "retreever": __version__,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def load_average() -> list[float] | None:
    """Load of the last 1, 5 and 15 minutes; None where the system does not report it."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def describe(facts: dict[str, Any]) -> str:
    """One line for the foot of a table."""
    threads = f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}"
    where = facts["accelerator"] or f"{facts['processor']}, {threads}"
    kernels = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "numba") if facts[name])
    return f"{where}; {kernels}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def _accelerator(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def version_of(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
