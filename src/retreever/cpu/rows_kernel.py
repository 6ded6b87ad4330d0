"""Passes over the rows of a matrix on a CPU that save others: layer norm and what stands before or behind it.

An item is ROWS rows. Addresses of what is not wanted are 0.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import torch
from torch import Tensor

from retreever.cpu.lanes_kernel import LANES, fma, keep_first, kernel, part, splat, total
from retreever.cpu.memory_kernel import claim, finish, give, pointer, take
from retreever.cpu.numba_run import Entries, run

ROWS = 64
COST = 8  # of an element, in multiply-adds


@part
def _sum_up(y, at, bias, factor, residual, width, real):
    """y = (y + bias) * factor + residual, in place, of one row."""
    for x in range(0, width, LANES):
        rest = width - x
        value = take(y, at + x, rest)
        if bias:
            value = value + take(pointer(bias, real), x, rest)
        if factor:
            value = value * take(pointer(factor, real), at + x, rest)
        if residual:
            value = value + take(pointer(residual, real), at + x, rest)
        give(y, at + x, value, rest)


@part
def _moments(y, at, width, real):
    """Mean and 1 / standard deviation of a row."""
    sums, squares = splat(0.0, real), splat(0.0, real)
    for x in range(0, width, LANES):
        sums = sums + take(y, at + x, width - x)
    mean = total(sums) / type(real)(width)
    for x in range(0, width, LANES):
        rest = width - x
        away = keep_first(take(y, at + x, rest) - splat(mean, real), rest)
        squares = fma(away, away, squares)
    return mean, type(real)(1 / math.sqrt(total(squares) / width + 1e-5))


@kernel
def sum_norm(tensors, sizes, items, turns, real):
    """y = (y + bias) * factor + residual in place, and its norm where that is wanted.

    Args:
        tensors: addresses of y (rows, width), bias (width), factor and residual (as y), weight and shift of the norm
            (width) and normed (as y).
        sizes: rows, width.
        items: ceil(rows / ROWS).
        turns: address of two counters, items claimed and items done, if threads share the work; or 0.
        real: any number of the type to compute in.
    """
    y, weight, shift, normed = (
        pointer(tensors[0], real), pointer(tensors[4], real), pointer(tensors[5], real), pointer(tensors[6], real)
    )  # fmt: skip
    rows, width = sizes
    index = claim(turns, -1)
    while index < items:
        for at in range(index * ROWS * width, min(rows, (index + 1) * ROWS) * width, width):
            if tensors[1] or tensors[2] or tensors[3]:
                _sum_up(y, at, tensors[1], tensors[2], tensors[3], width, real)
            mean, scale = _moments(y, at, width, real)
            for x in range(0, width if tensors[6] else 0, LANES):
                rest = width - x
                value = (take(y, at + x, rest) - splat(mean, real)) * splat(scale, real)
                value = fma(value, take(weight, x, rest), take(shift, x, rest))
                give(normed, at + x, value, rest)
        finish(turns)
        index = claim(turns, index)


@kernel
def norm_gradient(tensors, sizes, items, turns, real):
    """From the gradient of a norm to that of its input, plus `residual`, and of weight and shift.

    Args:
        tensors: addresses of the gradient (rows, width), x, weight, residual, out and sums (items, 3, width): what each
            item adds to the gradients of weight and shift, and the sum of its rows of out.
        sizes, items, turns, real: as in `sum_norm`.
    """
    slope, x_at, weight = pointer(tensors[0], real), pointer(tensors[1], real), pointer(tensors[2], real)
    out, sums = pointer(tensors[4], real), pointer(tensors[5], real)
    rows, width = sizes
    index = claim(turns, -1)
    while index < items:
        of_weight = 3 * index * width
        for x in range(0, 3 * width, LANES):
            give(sums, of_weight + x, splat(0.0, real), 3 * width - x)
        for at in range(index * ROWS * width, min(rows, (index + 1) * ROWS) * width, width):
            mean, scale = _moments(x_at, at, width, real)
            along, across = splat(0.0, real), splat(0.0, real)
            for x in range(0, width, LANES):
                rest = width - x
                grad, to = take(slope, at + x, rest), of_weight + x
                value = (take(x_at, at + x, rest) - splat(mean, real)) * splat(scale, real)
                give(sums, to, fma(grad, value, take(sums, to, rest)), rest)
                give(sums, to + width, grad + take(sums, to + width, rest), rest)
                grad = grad * take(weight, x, rest)
                along, across = along + grad, fma(grad, value, across)
            first, second = splat(total(along) / width, real), splat(total(across) / width, real)
            for x in range(0, width, LANES):
                rest = width - x
                value = (take(x_at, at + x, rest) - splat(mean, real)) * splat(scale, real)
                grad = take(slope, at + x, rest) * take(weight, x, rest) - first - value * second
                grad = grad * splat(scale, real)
                if tensors[3]:
                    grad = grad + take(pointer(tensors[3], real), at + x, rest)
                give(out, at + x, grad, rest)
                to = of_weight + 2 * width + x
                give(sums, to, grad + take(sums, to, rest), rest)
        finish(turns)
        index = claim(turns, index)


_SUM_NORM, _NORM_GRADIENT = Entries(sum_norm, 7, 2), Entries(norm_gradient, 6, 2)


def sum_rows(y: Tensor, bias: Tensor, factor: Tensor | None, residual: Tensor) -> None:
    """Make y = (y + bias) * factor + residual in place."""
    _run(_SUM_NORM, y, (y, bias.contiguous(), factor, residual, None, None, None))


def sum_norm_rows(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Make y = y + bias + residual in place; the norm of it, in `out` where that is given."""
    normed = torch.empty_like(y) if out is None else out
    _run(_SUM_NORM, y, (y, bias, None, residual, weight, shift, normed))
    return normed


def norm_gradient_rows(slope: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Write the gradient of x plus `residual` into `out`; gradients of weight and shift, and out's sum (3, width)."""
    sums = x.new_empty(-(-(x.numel() // x.shape[-1]) // ROWS), 3, x.shape[-1])
    _run(_NORM_GRADIENT, x, (slope, x, weight, residual, out, sums))
    return sums.sum(dim=0)


def _run(entries: Entries, x: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    run(entries, x.dtype, (addresses, (rows, width)), -(-rows // ROWS), COST * x.numel(), [*tensors])
