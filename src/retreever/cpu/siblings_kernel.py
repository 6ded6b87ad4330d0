"""Attention among siblings on a CPU, a family at a time, forward and backward; `siblings` is its door."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from torch import Tensor

from retreever.cpu.lanes_kernel import LANES, fma, kernel, larger, part, splat, total
from retreever.cpu.memory_kernel import claim, finish, give, pointer, room, take
from retreever.cpu.numba_run import Entries, run
from retreever.cpu.series_kernel import exp

FAMILIES = 32  # of an item
BYTE = np.uint8(0)


@part
def _dot(a, i, b, j, width, real):
    sums = splat(0.0, real)
    for x in range(0, width, LANES):
        rest = width - x
        sums = fma(take(a, i + x, rest), take(b, j + x, rest), sums)
    return total(sums)


@part
def _mix(weights, at, step, rows, first, stride, children, width, out, to, real):
    """out[to ...] = sum over c of weights[at + c * step] * rows[first + c * stride ...]."""
    for x in range(0, width, LANES):
        rest, acc = width - x, splat(0.0, real)
        for c in range(children):
            weight = splat(weights[at + c * step], real)
            acc = fma(weight, take(rows, first + c * stride + x, rest), acc)
        give(out, to + x, acc, rest)


@part
def _softmax(shares, at, children, heads, real):
    """Of shares[at + c * heads + h] over c."""
    for h in range(0, heads, LANES):
        rest = heads - h
        top, mass = take(shares, at + h, rest), splat(0.0, real)
        for c in range(1, children):
            top = larger(top, take(shares, at + c * heads + h, rest))
        for c in range(children):
            share = exp(take(shares, at + c * heads + h, rest) - top)
            give(shares, at + c * heads + h, share, rest)
            mass = mass + share
        mass = splat(1.0, real) / mass
        for c in range(children):
            give(shares, at + c * heads + h, take(shares, at + c * heads + h, rest) * mass, rest)


@part
def _attend_family(qkv, shares, factor, hidden, out, used, family, children, heads, width, real):
    size = heads * width
    for i in range(children):
        query, pairs = (family * children + i) * 3 * size, (family * children + i) * children * heads
        for c in range(children):
            key = (family * children + c) * 3 * size + size
            for h in range(heads):
                score = _dot(qkv, query + h * width, qkv, key + h * width, width, real)
                shares[pairs + c * heads + h] = score
            if hidden and pointer(hidden, BYTE)[family * children + c]:
                for h in range(heads):
                    shares[pairs + c * heads + h] = -np.inf
        _softmax(shares, pairs, children, heads, real)
        for p in range(children * heads):
            used[p] = shares[pairs + p] * (pointer(factor, real)[pairs + p] if factor else type(real)(1))
        values = family * children * 3 * size + 2 * size
        for h in range(heads):
            to = (family * children + i) * size + h * width
            _mix(used, h, heads, qkv, values + h * width, 3 * size, children, width, out, to, real)


@kernel
def attend_forward(tensors, sizes, items, turns, real):
    """Shares and what they read. An item is FAMILIES families.

    Args:
        tensors: addresses of qkv (g, k, 3, h, e), shares (g, k, k, h), factor (as shares, or 0), hidden (g, k bytes, or
            0) and out (g, k, h, e); all contiguous.
        sizes: families, children, heads, width; children * heads at most ROOM * LANES.
        items: ceil(families / FAMILIES).
        turns: address of two counters, items claimed and items done, if threads share the work; or 0.
        real: any number of the type to compute in.
    """
    qkv, shares, out = pointer(tensors[0], real), pointer(tensors[1], real), pointer(tensors[4], real)
    families, children, heads, width = sizes
    used = room(real)
    index = claim(turns, -1)
    while index < items:
        for family in range(index * FAMILIES, min(families, (index + 1) * FAMILIES)):
            _attend_family(qkv, shares, tensors[2], tensors[3], out, used, family, children, heads, width, real)
        finish(turns)
        index = claim(turns, index)


@part
def _family_gradient(qkv, shares, factor, grad, out, used, slopes, family, children, heads, width, real):
    size, pairs = heads * width, family * children * children * heads
    first = family * children * 3 * size
    for i in range(children):
        row = (family * children + i) * size
        for h in range(heads):
            mean = type(real)(0)
            for c in range(children):
                p = (i * children + c) * heads + h
                scale = pointer(factor, real)[pairs + p] if factor else type(real)(1)
                value = first + c * 3 * size + 2 * size + h * width
                slopes[p] = _dot(grad, row + h * width, qkv, value, width, real) * scale
                used[p] = shares[pairs + p] * scale
                mean += shares[pairs + p] * slopes[p]
            for c in range(children):
                p = (i * children + c) * heads + h
                slopes[p] = shares[pairs + p] * (slopes[p] - mean)
    across = children * heads
    for i in range(children):
        for h in range(heads):
            to, keys = first + i * 3 * size + h * width, first + size + h * width
            _mix(slopes, i * across + h, heads, qkv, keys, 3 * size, children, width, out, to, real)
            _mix(slopes, i * heads + h, across, qkv, first + h * width, 3 * size, children, width, out, to + size, real)
            rows = family * children * size + h * width
            _mix(used, i * heads + h, across, grad, rows, size, children, width, out, to + 2 * size, real)


@kernel
def attend_gradient(tensors, sizes, items, turns, real):
    """From the gradient of what was read to that of qkv. Addresses of qkv, shares, factor, the first, the last."""
    qkv, shares = pointer(tensors[0], real), pointer(tensors[1], real)
    grad, out = pointer(tensors[3], real), pointer(tensors[4], real)
    families, children, heads, width = sizes
    used, slopes = room(real), room(real)
    index = claim(turns, -1)
    while index < items:
        for family in range(index * FAMILIES, min(families, (index + 1) * FAMILIES)):
            _family_gradient(qkv, shares, tensors[2], grad, out, used, slopes, family, children, heads, width, real)
        finish(turns)
        index = claim(turns, index)


@kernel
def family_mean(tensors, sizes, items, turns, real):
    """What children are to their parent: the mean, or sum by `counts`, of (fed + bias) * factor + residual.

    Args:
        tensors: addresses of fed (g, k, d), bias (d), factor (as fed, or 0), residual (as fed), counts (g, k; or 0) and
            parents (g, d).
        sizes: families, children, d, 1.
        items, turns, real: as in `attend_forward`.
    """
    fed, bias, residual = pointer(tensors[0], real), pointer(tensors[1], real), pointer(tensors[3], real)
    families, children, width, _ = sizes
    index = claim(turns, -1)
    while index < items:
        for family in range(index * FAMILIES, min(families, (index + 1) * FAMILIES)):
            for x in range(0, width, LANES):
                rest, acc, shift = width - x, splat(0.0, real), take(bias, x, width - x)
                for child in range(family * children, (family + 1) * children):
                    value = take(fed, child * width + x, rest) + shift
                    if tensors[2]:
                        value = value * take(pointer(tensors[2], real), child * width + x, rest)
                    value = value + take(residual, child * width + x, rest)
                    share = pointer(tensors[4], real)[child] if tensors[4] else type(real)(1 / children)
                    acc = fma(splat(share, real), value, acc)
                give(pointer(tensors[5], real), family * width + x, acc, rest)
        finish(turns)
        index = claim(turns, index)


_FORWARD, _GRADIENT = Entries(attend_forward, 5, 4), Entries(attend_gradient, 5, 4)
_MEAN = Entries(family_mean, 6, 4)


def attend_families(qkv: Tensor, shares: Tensor, factor: Tensor | None, hidden: Tensor | None, out: Tensor) -> None:
    """Write shares and what they read."""
    hidden = None if hidden is None else hidden.contiguous()
    families, children, _, heads, width = qkv.shape
    _run(_FORWARD, (families, children, heads, width), (qkv, shares, factor, hidden, out))


def attend_families_gradient(qkv: Tensor, shares: Tensor, factor: Tensor | None, grad: Tensor, out: Tensor) -> None:
    """Write the gradient of queries, keys and values."""
    families, children, _, heads, width = qkv.shape
    _run(_GRADIENT, (families, children, heads, width), (qkv, shares, factor, grad, out))


def mean_of_families(
    fed: Tensor, bias: Tensor, factor: Tensor | None, residual: Tensor, counts: Tensor | None, parents: Tensor
) -> None:
    """Write what the children in the rows of `fed` are to their `parents`."""
    counts = None if counts is None else counts.contiguous()
    sizes = (len(parents), len(fed) // len(parents), fed.shape[1], 1)
    _run(_MEAN, sizes, (fed, bias.contiguous(), factor, residual, counts, parents))


def _run(entries: Entries, sizes: tuple[int, ...], tensors: tuple[Tensor | None, ...]) -> None:
    families, children, heads, width = sizes
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    work = 4 * families * children**2 * heads * width
    dtype = next(tensor.dtype for tensor in tensors if tensor is not None)
    run(entries, dtype, (addresses, sizes), -(-families // FAMILIES), work, [*tensors])
