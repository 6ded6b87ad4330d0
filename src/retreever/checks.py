"""Input checks shared by all layers: each raises `InputError` naming the argument, what was expected, what was given.

Shape, type and device checks are cheap and always run. Checks of *values* (NaN, all-masked rows) read the data, so they
are skipped while a graph is being compiled or captured, where values cannot be read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.errors import BackendError


def check_tensor(argument: str, value: object, shape: str, **sizes: int) -> None:
    """`value` must be a tensor whose axes are named in `shape`; an axis named in `sizes` has that length.

    >>> check_tensor("query", query, "b m d", b=16, d=64)
    """
    if not isinstance(value, Tensor):
        reject(argument, f"a tensor of shape ({shape.replace(' ', ', ')})", type(value).__name__)
    if value.layout != torch.strided or value.is_complex():
        reject(argument, "a dense tensor of real numbers", f"{value.dtype} {value.layout}".replace("torch.", ""))
    axes = shape.split()
    if value.dim() != len(axes):
        reject(argument, _wanted(axes, sizes), f"{value.dim()} axes {tuple(value.shape)}")
    for axis, length in zip(axes, value.shape, strict=True):
        if axis in sizes and sizes[axis] != length:
            reject(argument, _wanted(axes, sizes), tuple(value.shape))


def _wanted(axes: list[str], sizes: dict[str, int]) -> str:
    """Called when a shape is refused only: written out, a size would be a constant of a compiled graph."""
    return "shape (" + ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes) + ")"


def check_float(argument: str, value: Tensor) -> None:
    """`value` must hold floating point numbers."""
    if not value.dtype.is_floating_point:
        reject(argument, "a floating point dtype", value.dtype)


def check_mask(argument: str, mask: object, shape: str, **sizes: int) -> None:
    """`mask` must be a bool tensor of the shape, True where a token is real."""
    check_tensor(argument, mask, shape, **sizes)
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        reject(argument, "dtype torch.bool (True = real)", mask.dtype)


def check_same(argument: str, value: Tensor, other: str, like: Tensor, dtype: bool = True) -> None:
    """`value` must share device and, unless `dtype` is False, dtype with `like`, the tensor named `other`."""
    if value.device != like.device:
        reject(argument, f"the device of {other} ({like.device})", value.device)
    if dtype and value.dtype != like.dtype:
        reject(argument, f"the dtype of {other} ({like.dtype})", value.dtype)


def check_like_weights(argument: str, value: Tensor, module: nn.Module) -> None:
    """`value` must share device and, outside autocast, dtype with the weights of `module`.

    A module without floating point parameters (quantised layers) is not compared.
    """
    weight = next(module.parameters(), None)
    if weight is None or not weight.dtype.is_floating_point:
        return
    check_same(argument, value, "the weights", weight, dtype=False)
    if value.dtype != weight.dtype and not torch.is_autocast_enabled(value.device.type):
        check_same(argument, value, "the weights", weight)


def values_readable(tensor: Tensor) -> bool:
    """Whether values can be read: not while compiling, tracing shapes, under vmap or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_finite(argument: str, value: Tensor, mask: Tensor | None = None) -> None:
    """Every real entry of `value` must be finite and have a square that is; `mask` (leading axes) marks real ones."""
    if not values_readable(value) or value.numel() == 0:
        return
    if mask is not None:
        value = value.masked_fill(~mask.reshape(mask.shape + (1,) * (value.dim() - mask.dim())), 0)
    limit = largest_input(value.dtype)
    low, high = torch.aminmax(value)  # both are NaN where any value is
    if low.item() >= -limit and high.item() <= limit:
        return
    bad = int(torch.isfinite(value).logical_not().sum())
    if bad:
        reject(argument, "finite values", f"{bad} NaN or infinite of {value.numel()}")
    got = max(-float(low), float(high))
    reject(argument, f"values of at most {limit:.2g}, whose squares can be added", f"{got:.2g}")


@cache
def largest_input(dtype: torch.dtype) -> float:
    """Up to here norms and scores of finite input are finite; half precision is too narrow to spare any of it."""
    largest = torch.finfo(dtype).max
    return largest if dtype == torch.float16 else largest**0.5 / 64


def check_any_real(argument: str, mask: Tensor) -> None:
    """Every row of `mask` (b, n) must have at least one real token."""
    if not values_readable(mask):
        return
    empty = mask.any(dim=-1).logical_not()
    if bool(empty.any()):
        reject(argument, "at least one real token in every row", f"{int(empty.sum())} rows with none")


def drawn_from(generator: torch.Generator | None, device: torch.device) -> dict[str, Any]:
    """Arguments of torch's random functions, which draw where `generator` is, or on `device` from torch's own.

    `generator=None` cannot be compiled where shapes vary.
    """
    if generator is None:
        return {"device": device}
    if not isinstance(generator, torch.Generator):
        reject("generator", "a torch.Generator, or None", type(generator).__name__)
    return {"device": generator.device, "generator": generator}


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the accelerator where there is one and the CPU otherwise."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        reject("device", "auto, cpu, cuda or another device torch knows", repr(name))
    if device.type not in ("cpu", found.type if found else "cpu"):
        raise BackendError(f"device: {name} is not available here, only {found.type + ' and ' if found else ''}cpu")
    if device.type != "cpu" and (device.index or 0) >= torch.accelerator.device_count():
        raise BackendError(f"device: expected one of {torch.accelerator.device_count()}, got {name}")
    return device
