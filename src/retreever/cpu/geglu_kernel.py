"""The gate of GEGLU on a CPU, in one pass forward and one backward; `geglu` is its door.

Both need Phi(x), the normal distribution, and its density: one exponential gives both, by the formula 7.1.26 of
Abramowitz and Stegun for the error function, good to float32.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

from torch import Tensor

from retreever.cpu.lanes_kernel import LANES, fma, kernel, larger, splat, step, where_less
from retreever.cpu.memory_kernel import claim, finish, give, pointer, take
from retreever.cpu.numba_run import Entries, run
from retreever.cpu.series_kernel import exp

ROWS = 64  # of an item
COST = 12  # of an element, in multiply-adds
_TERMS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
P, A1, A2, A3, A4, A5 = 0.3275911, *(0.5 * term for term in _TERMS)
HALF, PEAK = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


@step
def _normal(x, real):
    """Phi(x), and its density up to the factor PEAK."""
    zero, one = splat(0.0, real), splat(1.0, real)
    size = larger(x, zero - x) * splat(HALF, real)
    t = one / fma(splat(P, real), size, one)
    tail = fma(splat(A5, real), t, splat(A4, real))
    tail = fma(tail, t, splat(A3, real))
    tail = fma(tail, t, splat(A2, real))
    tail = fma(tail, t, splat(A1, real)) * t
    bell = exp(zero - size * size)
    tail = tail * bell
    return where_less(x, zero, tail, one - tail), bell


@step
def _halves(up, bias, at, x, hidden, rest, real):
    """Values and gates from up[at] on, their bias added."""
    value, gate = take(up, at, rest), take(up, at + hidden, rest)
    if bias:
        value = value + take(pointer(bias, real), x, rest)
        gate = gate + take(pointer(bias, real), x + hidden, rest)
    return value, gate


@kernel
def gate_forward(tensors, sizes, items, turns, real):
    """Value times gelu of the gate. An item is ROWS rows.

    Args:
        tensors: addresses of up (rows, 2 hidden), a bias to add to it (2 hidden; or 0) and gated (rows, hidden).
        sizes: rows, hidden.
        items: ceil(rows / ROWS).
        turns: address of two counters, items claimed and items done, if threads share the work; or 0.
        real: any float32.
    """
    up, gated = pointer(tensors[0], real), pointer(tensors[2], real)
    rows, hidden = sizes
    index = claim(turns, -1)
    while index < items:
        for row in range(index * ROWS, min(rows, (index + 1) * ROWS)):
            for x in range(0, hidden, LANES):
                at, rest = row * 2 * hidden + x, hidden - x
                value, gate = _halves(up, tensors[1], at, x, hidden, rest, real)
                give(gated, row * hidden + x, value * gate * _normal(gate, real)[0], rest)
        finish(turns)
        index = claim(turns, index)


@kernel
def gate_gradient(tensors, sizes, items, turns, real):
    """From the gradient of gated to that of up, and its sum over the rows of every item.

    Args:
        tensors: addresses of the first, up, its bias, the second (as up) and sums (items, 2 hidden).
        sizes, items, turns, real: as in `gate_forward`.
    """
    grad, up, out = pointer(tensors[0], real), pointer(tensors[1], real), pointer(tensors[3], real)
    sums = pointer(tensors[4], real)
    rows, hidden = sizes
    index = claim(turns, -1)
    while index < items:
        for x in range(0, hidden, LANES):
            of_values, of_gates, rest = splat(0.0, real), splat(0.0, real), hidden - x
            for row in range(index * ROWS, min(rows, (index + 1) * ROWS)):
                at = row * 2 * hidden + x
                slope = take(grad, row * hidden + x, rest)
                value, gate = _halves(up, tensors[2], at, x, hidden, rest, real)
                below, bell = _normal(gate, real)
                of_value = slope * gate * below
                of_gate = slope * value * fma(gate * splat(PEAK, real), bell, below)
                give(out, at, of_value, rest)
                give(out, at + hidden, of_gate, rest)
                of_values, of_gates = of_values + of_value, of_gates + of_gate
            give(sums, 2 * index * hidden + x, of_values, rest)
            give(sums, (2 * index + 1) * hidden + x, of_gates, rest)
        finish(turns)
        index = claim(turns, index)


_FORWARD, _GRADIENT = Entries(gate_forward, 3, 2), Entries(gate_gradient, 5, 2)


def gate_rows(up: Tensor, bias: Tensor | None, gated: Tensor) -> None:
    """Write value * gelu(gate) of `up` + `bias` into `gated`."""
    _run(_FORWARD, up, (up, bias, gated))


def gate_gradient_rows(grad: Tensor, up: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write the gradient of `up` into `out`; that of the bias."""
    width = up.shape[-1]
    sums = up.new_empty(-(-(up.numel() // width) // ROWS), width)
    _run(_GRADIENT, up, (grad.contiguous(), up, bias, out, sums))
    return sums.sum(dim=0)


def _run(entries: Entries, up: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    hidden = up.shape[-1] // 2
    rows = up.numel() // (2 * hidden)
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    run(entries, up.dtype, (addresses, (rows, hidden)), -(-rows // ROWS), COST * rows * hidden, [*tensors])
