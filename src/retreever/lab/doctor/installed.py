"""Facts about this installation: versions, devices, settings, and folders of compiled kernels."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

from retreever.lab.bench.machine import machine, version_of
from retreever.lab.doctor.checks import device_names, one_line

PASSIVE = "; modules then take two to four times as long for few queries, as threads fall asleep between operations"
PACKAGES = ("torch", "triton", "numba", "numpy", "matplotlib")


def facts() -> dict[str, dict[str, str]]:
    """All facts as text, by heading and name."""
    here = machine()
    versions = {"retreever": here["retreever"], "python": f"{here['python']} on {platform.system()}"}
    cpu = f"{here['processor']}, cores: {here['cores']}, threads of torch: {here['threads']}"
    return {
        "versions": versions | {package: version_of(package) or "not installed" for package in PACKAGES},
        "devices": {"cpu": cpu} | {device: accelerator(device) for device in device_names()[1:]},
        "settings": settings(),
        "folders": dict(folders()),
    }


def accelerator(device: str) -> str:
    """Name and memory of a CUDA device; torch does not report them for others."""
    if not device.startswith("cuda"):
        return "an accelerator torch knows"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def settings() -> dict[str, str]:
    """Environment variables that matter; the two of OpenMP even when not set."""
    found = {name: os.environ.get(name, "not set") for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    if found["OMP_WAIT_POLICY"].lower() == "passive":
        found["OMP_WAIT_POLICY"] += PASSIVE
    prefixes = ("NUMBA_", "TRITON_", "CUDA_VISIBLE_DEVICES")
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def folders() -> Iterator[tuple[str, str]]:
    """Folders of compiled Numba and Triton kernels."""
    try:
        kept = import_module("retreever.ops.search.forward_numba").forward.stats.cache_path
        yield "numba", folder(kept) if kept else "none can be written: every process compiles anew"
    except Exception as error:
        yield "numba", f"no kernels ({one_line(error)})"
    home = os.environ.get("TRITON_HOME", "~")
    yield "triton", folder(os.environ.get("TRITON_CACHE_DIR", f"{home}/.triton/cache"))


def folder(name: str) -> str:
    """A folder, which need not exist yet, and whether it can be written."""
    path = Path(name).expanduser().absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return f"{path} ({'writable' if writable else 'not writable: every process compiles anew'})"
