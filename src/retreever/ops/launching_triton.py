"""Shared by all launches of Triton kernels: the precision of matrix products, the device, and the start itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

# From this version on a compiled kernel takes the same arguments as the function it was compiled from.
DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
ALIGNED, LARGEST = 16, 2**31  # what Triton compiles anew for: bytes of alignment, and integers of 64 bits


def precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot`: float32 accuracy (three passes of tf32) for float32, unless the user allows tf32."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which the tensor's device is the current device, on which kernels start."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


class Launcher:
    """Starts a Triton kernel whose sizes are not specialised.

    Triton looks at every argument of every call, which takes several times as long as the start itself. Here a call
    like an earlier one goes straight to the compiled kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiles = isinstance(kernel, triton.JITFunction)  # Triton's interpreter does not
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Start `programs` programs on the current device."""
        kinds = tuple([None if x is None else (x.dtype, x.data_ptr() % ALIGNED == 0) for x in tensors])
        first = next(x for x in tensors if x is not None)
        kind = (kinds, constants, tuple(options.values()), first.get_device())
        found = self.compiled.get(kind) if max(sizes) < LARGEST else None
        if found is not None:
            found[programs, 1, 1](*tensors, *sizes, *constants)
            return
        found = self.kernel[(programs,)](*tensors, *sizes, *constants, **options)
        if DIRECT and self.compiles and max(sizes) < LARGEST:
            self.compiled[kind] = found
