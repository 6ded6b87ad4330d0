"""Shared by all launches of Triton kernels: the precision of matrix products, and the device they start on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot`: float32 accuracy (three passes of tf32) for float32, unless the user allows tf32."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which the tensor's device is the current device, on which kernels start."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
