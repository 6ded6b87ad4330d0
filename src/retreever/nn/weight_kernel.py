"""Gradients of the weights and biases of up to three linear layers in one Triton launch, for training on CUDA.

A library makes each weight's gradient in two launches and each bias's in another, and here rows are many while weights
are small. Every program sums a tile over its share of the rows; what the shares found is added up in a fixed order, so
the result is the same to the bit whenever it is made.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from retreever.nn.product_kernel import precision, product

ROWS, TILE, LAYERS = 64, 64, 3
SHARE, SHARES = 128, 64  # rows of a share at least, shares at most


@triton.jit
def tile_gradient(
    slope, source, sums, tile, first, share, count, OUT: tl.constexpr, STRIDE: tl.constexpr, IN: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of slope.T @ source over rows first ... first + share - 1, and of the sum of slope."""
    out = tile // (IN // BI) * BO + tl.arange(0, BO)
    into = tile % (IN // BI) * BI + tl.arange(0, BI)
    total, bias = tl.zeros([BO, BI], tl.float32), tl.zeros([BO], tl.float32)
    for start in range(0, share, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < count)[:, None]
        g = tl.load(slope + row[:, None] * STRIDE + out[None, :], mask=inside, other=0.0)
        x = tl.load(source + row[:, None] * IN + into[None, :], mask=inside, other=0.0)
        total += product(tl.trans(g), x, PRECISION)
        bias += tl.sum(g, axis=0)
    tl.store(sums + out[:, None] * IN + into[None, :], total)
    if BIAS:
        tl.store(sums + OUT * IN + out, bias, mask=(out < OUT) & (tile % (IN // BI) == 0))


@triton.jit
def row_sum(found, sums, first, share, count, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The sum of rows first ... first + share - 1."""
    column, total = tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.float32)
    for start in range(0, share, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = ((row < share) & (first + row < count))[:, None]
        rows = tl.load(found + (first + row)[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        total += tl.sum(rows, axis=0)
    tl.store(sums + column, total)


@triton.jit(do_not_specialize=["count", "share", "programs"])
def layer_gradients(
    slope0, source0, slope1, source1, slope2, source2, norm, sums, count, share, programs, width,
    O0: tl.constexpr, S0: tl.constexpr, I0: tl.constexpr, BO0: tl.constexpr, BI0: tl.constexpr, BIAS0: tl.constexpr,
    O1: tl.constexpr, S1: tl.constexpr, I1: tl.constexpr, BO1: tl.constexpr, BI1: tl.constexpr, BIAS1: tl.constexpr,
    O2: tl.constexpr, S2: tl.constexpr, I2: tl.constexpr, BO2: tl.constexpr, BI2: tl.constexpr, BIAS2: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles of one layer after those of the other; a layer that is not there has no outputs. Last come norms."""
    tile, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * share
    sums += tl.program_id(1).to(tl.int64) * width
    tiles0: tl.constexpr = (O0 // BO0) * (I0 // BI0)
    tiles1: tl.constexpr = (O1 // BO1) * (I1 // BI1)
    tiles2: tl.constexpr = (O2 // BO2) * (I2 // BI2)
    if tile < tiles0:
        tile_gradient(slope0, source0, sums, tile, first, share, count, O0, S0, I0, BO0, BI0, BIAS0, PRECISION, ROWS)
    elif tile < tiles0 + tiles1:
        sums += O0 * I0 + BIAS0 * O0
        tile -= tiles0
        tile_gradient(slope1, source1, sums, tile, first, share, count, O1, S1, I1, BO1, BI1, BIAS1, PRECISION, ROWS)
    elif tile < tiles0 + tiles1 + tiles2:
        sums += O0 * I0 + BIAS0 * O0 + O1 * I1 + BIAS1 * O1
        tile -= tiles0 + tiles1
        tile_gradient(slope2, source2, sums, tile, first, share, count, O2, S2, I2, BO2, BI2, BIAS2, PRECISION, ROWS)
    elif NORM:
        own = tl.cdiv(programs, tl.num_programs(1))
        row_sum(norm, sums + width - NORM, tl.program_id(1) * own, own, programs, NORM, 16)


def weight_gradients(layers: Sequence[tuple[Tensor, Tensor, bool]], norm: Tensor | None = None) -> list[Tensor]:
    """For each layer, given as (gradient of its output, its input, has a bias): gradients of weight and bias.

    Gradients may be columns of a wider matrix. With `norm` (programs, 2, d), what programs found for the weight and
    bias of a norm, the sum of these comes last.
    """
    count = len(layers[0][0])
    share = max(SHARE, -(-count // (SHARES * ROWS)) * ROWS)
    shares = -(-count // share)
    shapes = [shape for slope, source, bias in layers for shape in _shapes(slope, source, bias)]
    shapes += [] if norm is None else [norm.shape[1:]]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sums = layers[0][0].new_empty(shares, sum(sizes))
    tensors: list[Tensor] = []
    arguments: dict[str, Any] = {}
    tiles = 0
    for index in range(LAYERS):
        slope, source, bias = layers[min(index, len(layers) - 1)]
        out, into = (slope.shape[1] if index < len(layers) else 0), source.shape[1]
        bo, bi = _tile(slope.shape[1]), _tile(into)
        tensors += [slope, source]
        tiles += (out // bo) * (into // bi)
        own = {"O": out, "S": slope.stride(0), "I": into, "BO": bo, "BI": bi, "BIAS": bias}
        arguments |= {f"{name}{index}": value for name, value in own.items()}
    arguments["NORM"] = 0 if norm is None else sizes[-1]
    layer_gradients[(tiles + (norm is not None), shares)](
        *tensors, norm, sums, count, share, 0 if norm is None else len(norm), sums.shape[1], **arguments,
        PRECISION=precision(sums.dtype), ROWS=ROWS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return [part.view(shape) for part, shape in zip(sums.sum(dim=0).split_with_sizes(sizes), shapes, strict=True)]


def _shapes(slope: Tensor, source: Tensor, bias: bool) -> list[tuple[int, ...]]:
    out = slope.shape[1]
    return [(out, source.shape[1]), *([(out,)] if bias else [])]


def _tile(width: int) -> int:
    """The largest tile side that divides a width."""
    return min(TILE, width & -width)
