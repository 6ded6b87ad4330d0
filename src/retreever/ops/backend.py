"""Names of the backends of all operators, where each can run, and which one runs. No other module decides this.

"reference" is plain torch. "triton" (CUDA) and "numba" (CPU) are kernels of this package; an operator that has no
kernel for the requested backend runs in plain torch. A backend requested by name that cannot run raises
`BackendError`; it never falls back. While `torch.export` traces a model, "auto" is plain torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Literal, get_args

import torch
from torch import Tensor

from retreever.arguments import check_choice
from retreever.errors import BackendError

Impl = Literal["auto", "reference", "triton", "numba"]
IMPLS: tuple[Impl, ...] = get_args(Impl)
Operator = Literal["search", "frontier", "attention", "aggregate", "climb"]
KERNELS: dict[Operator, tuple[Impl, ...]] = {
    "search": ("triton", "numba"),
    "frontier": ("triton", "numba"),
    "attention": ("triton",),
    "aggregate": ("triton",),
    "climb": ("triton", "numba"),
}
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUMBA_DTYPES = (torch.float32, torch.float64)

_switched_off: set[Operator] = set()
_chosen: dict[tuple[Operator, str, str, torch.dtype], Impl] = {}


def choose(operator: Operator, impl: Impl, like: Tensor) -> Impl:
    """The backend that runs `operator` on tensors like `like`: "reference", "triton" or "numba"."""
    if operator in _switched_off:
        return "reference"
    # `like.is_cpu` takes a quarter of the time of `like.device`.
    kind = (operator, impl, "cpu" if like.is_cpu else like.device.type, like.dtype)
    if torch.compiler.is_compiling():  # a graph would depend on the contents of the dictionary
        return "reference" if impl == "auto" and exporting() else _choose(*kind)
    found = _chosen.get(kind)
    if found is None:
        found = _chosen[kind] = _choose(*kind)
    return found


def _choose(operator: Operator, impl: Impl, device: str, dtype: torch.dtype) -> Impl:
    check_choice("impl", impl, IMPLS)
    reason = unavailable(impl, device, dtype)
    if reason is not None:
        raise BackendError(f"impl='{impl}' cannot run here: {reason}")
    wanted: Impl = impl
    if impl == "auto":
        wanted = "triton" if device == "cuda" else "numba"
        if unavailable(wanted, device, dtype) is not None:
            wanted = "reference"
    return wanted if wanted in KERNELS[operator] else "reference"


# Same effect as torch.compiler.assume_constant_result, without importing the compiler.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unavailable(impl: Impl, device: str, dtype: torch.dtype) -> str | None:
    """Why `impl` cannot run on tensors of that device type and dtype; None when it can."""
    if impl in ("auto", "reference"):
        return None
    try:
        module = import_module(impl)
    except (ImportError, OSError) as error:
        return f"{impl} cannot be imported: {' '.join(str(error).split())}"
    device = torch.device(device).type
    if impl == "triton":
        return _triton_unavailable(device, dtype)
    if device != "cpu":
        return f"numba needs CPU tensors, got {device}"
    if dtype not in NUMBA_DTYPES:
        return f"numba takes float32 and float64, got {dtype}"
    return "compilation is switched off (NUMBA_DISABLE_JIT)" if module.config.DISABLE_JIT else None


def _triton_unavailable(device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda" and not interpreting():
        return f"triton needs CUDA tensors, got {device}"
    if dtype not in TRITON_DTYPES:
        return f"triton computes in float32 and takes float32, float16 or bfloat16, got {dtype}"
    return None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which takes tensors of any device."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def exporting() -> bool:
    """Whether `torch.export` is tracing; its programs run without this package, so they must be plain torch.

    Reads the flag behind `torch.compiler.is_exporting`, which up to torch 2.12 is True in everything torch.compile
    traces.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)  # torch 2.6 has none


def transformed() -> bool:
    """Whether a torch.func transform is active; kernels have no rules for those."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def without(*operators: Operator) -> Iterator[None]:
    """Run `operators` in plain torch inside the block, whatever `impl` is: for ablations of the kernels."""
    added = {*operators} - _switched_off
    _switched_off.update(added)
    try:
        yield
    finally:
        _switched_off.difference_update(added)
