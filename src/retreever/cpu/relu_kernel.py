"""Bias and ReLU on a CPU in one pass, forward and backward; `relu_layers` is their door. An item is ROWS rows."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from torch import Tensor

from retreever.cpu.lanes_kernel import LANES, kernel, splat, where_less
from retreever.cpu.memory_kernel import claim, finish, give, pointer, take
from retreever.cpu.numba_run import Entries, run

ROWS = 64
COST = 4  # of an element, in multiply-adds


@kernel
def bias_relu(tensors, sizes, items, turns, real):
    """y = relu(y + bias), in place.

    Args:
        tensors: addresses of y (rows, width) and bias (width).
        sizes: rows, width.
        items: ceil(rows / ROWS).
        turns: address of two counters, items claimed and items done, if threads share the work; or 0.
        real: any number of the type to compute in.
    """
    y, bias, zero = pointer(tensors[0], real), pointer(tensors[1], real), splat(0.0, real)
    rows, width = sizes
    index = claim(turns, -1)
    while index < items:
        for at in range(index * ROWS * width, min(rows, (index + 1) * ROWS) * width, width):
            for x in range(0, width, LANES):
                value = take(y, at + x, width - x) + take(bias, x, width - x)
                give(y, at + x, where_less(value, zero, zero, value), width - x)
        finish(turns)
        index = claim(turns, index)


@kernel
def relu_gradient(tensors, sizes, items, turns, real):
    """The gradient where y is positive, else 0, in place, and its sum over the rows of every item.

    Args:
        tensors: addresses of the gradient (rows, width), y (as the gradient) and sums (items, width).
        sizes, items, turns, real: as in `bias_relu`.
    """
    grad, y, sums = pointer(tensors[0], real), pointer(tensors[1], real), pointer(tensors[2], real)
    zero, (rows, width) = splat(0.0, real), sizes
    index = claim(turns, -1)
    while index < items:
        for x in range(0, width, LANES):
            total = zero
            for at in range(index * ROWS * width + x, min(rows, (index + 1) * ROWS) * width + x, width):
                value = where_less(zero, take(y, at, width - x), take(grad, at, width - x), zero)
                give(grad, at, value, width - x)
                total = total + value
            give(sums, index * width + x, total, width - x)
        finish(turns)
        index = claim(turns, index)


_BIAS_RELU, _RELU_GRADIENT = Entries(bias_relu, 2, 2), Entries(relu_gradient, 3, 2)


def bias_relu_rows(y: Tensor, bias: Tensor) -> None:
    """y = relu(y + bias), in place."""
    _run(_BIAS_RELU, y, bias)


def relu_gradient_rows(grad: Tensor, y: Tensor) -> Tensor:
    """Cut `grad` in place where y is not positive; the gradient of the bias."""
    sums = y.new_empty(-(-len(y) // ROWS), y.shape[1])
    _run(_RELU_GRADIENT, grad, y, sums)
    return sums.sum(dim=0)


def _run(entries: Entries, *tensors: Tensor) -> None:
    rows, width = tensors[0].shape
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    run(entries, tensors[0].dtype, (addresses, (rows, width)), -(-rows // ROWS), COST * rows * width, [*tensors])
