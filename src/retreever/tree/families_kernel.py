"""Attention among siblings in Triton, forward and backward, many families a program; the CUDA side of `siblings`.

Queries, keys and values lie side by side (g, k, 3, h, e), queries already scaled; shares are (g, k, k, h), query before
key. A program holds every product of its families at once: a family has at most sixteen pairs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

CELLS = 4096  # products of a program


@triton.jit
def places(family, part, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr,
           EP: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Where one part of all children of families lies, (f, h, k, e), and which of these exist besides the family."""
    h, k, e = tl.arange(0, HP)[None, :, None, None], tl.arange(0, KP)[None, None, :, None], tl.arange(0, EP)
    e = e[None, None, None, :]
    child = family[:, None, None, None] * K + k
    return ((child * PARTS + part) * H + h) * E + e, (h < H) & (k < K) & (e < E)


@triton.jit
def pairs(family, K: tl.constexpr, H: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr):
    """Where the shares of families lie, (f, h, query, key), and which of these exist besides the family."""
    h, key = tl.arange(0, HP)[None, :, None, None], tl.arange(0, KP)[None, None, None, :]
    query = tl.arange(0, KP)[None, None, :, None]
    cell = ((family[:, None, None, None] * K + query) * K + key) * H + h
    return cell, (h < H) & (query < K) & (key < K)


@triton.jit(do_not_specialize=["count"])
def attend_families(
    qkv, shares, factor, hidden, out, count, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, KP: tl.constexpr,
    HP: tl.constexpr, EP: tl.constexpr, HIDE: tl.constexpr, DROP: tl.constexpr, FAMILIES: tl.constexpr,
):  # fmt: skip
    """Shares, before dropout by `factor`, and what they read; nobody attends to `hidden` children."""
    family = tl.program_id(0).to(tl.int64) * FAMILIES + tl.arange(0, FAMILIES)
    there = (family < count)[:, None, None, None]
    at, real = places(family, 0, K, H, E, KP, HP, EP, 3)
    q = tl.load(qkv + at, mask=there & real, other=0.0)
    keys = tl.load(qkv + at + H * E, mask=there & real, other=0.0)
    values = tl.load(qkv + at + 2 * H * E, mask=there & real, other=0.0)
    scores = tl.sum(q[:, :, :, None, :] * keys[:, :, None, :, :], axis=4)
    cell, exists = pairs(family, K, H, KP, HP)
    key = tl.arange(0, KP)[None, None, None, :]
    seen = key < K
    if HIDE:
        child = family[:, None, None, None] * K + key
        seen = seen & (tl.load(hidden + child, mask=there & seen, other=0) == 0)
    scores = tl.where(seen | ~there, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=3)[:, :, :, None])
    weights = weights / tl.sum(weights, axis=3)[:, :, :, None]
    tl.store(shares + cell, weights, mask=there & exists)
    if DROP:
        weights *= tl.load(factor + cell, mask=there & exists, other=0.0)
    read = tl.sum(weights[:, :, :, :, None] * values[:, :, None, :, :], axis=3)
    into, real = places(family, 0, K, H, E, KP, HP, EP, 1)
    tl.store(out + into, read, mask=there & real)


@triton.jit(do_not_specialize=["count"])
def families_gradient(
    qkv, shares, factor, grad, d_qkv, count, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, KP: tl.constexpr,
    HP: tl.constexpr, EP: tl.constexpr, DROP: tl.constexpr, FAMILIES: tl.constexpr,
):  # fmt: skip
    """From the gradient of what was read, those of queries, keys and values."""
    family = tl.program_id(0).to(tl.int64) * FAMILIES + tl.arange(0, FAMILIES)
    there = (family < count)[:, None, None, None]
    at, real = places(family, 0, K, H, E, KP, HP, EP, 3)
    q = tl.load(qkv + at, mask=there & real, other=0.0)
    keys = tl.load(qkv + at + H * E, mask=there & real, other=0.0)
    values = tl.load(qkv + at + 2 * H * E, mask=there & real, other=0.0)
    into, real = places(family, 0, K, H, E, KP, HP, EP, 1)
    slope = tl.load(grad + into, mask=there & real, other=0.0)
    cell, exists = pairs(family, K, H, KP, HP)
    weights = tl.load(shares + cell, mask=there & exists, other=0.0)
    d_weights = tl.sum(slope[:, :, :, None, :] * values[:, :, None, :, :], axis=4)
    used = weights
    if DROP:
        kept = tl.load(factor + cell, mask=there & exists, other=0.0)
        used, d_weights = weights * kept, d_weights * kept
    d_scores = weights * (d_weights - tl.sum(weights * d_weights, axis=3)[:, :, :, None])
    d_q = tl.sum(d_scores[:, :, :, :, None] * keys[:, :, None, :, :], axis=3)
    d_keys = tl.sum(d_scores[:, :, :, :, None] * q[:, :, :, None, :], axis=2)
    d_values = tl.sum(used[:, :, :, :, None] * slope[:, :, :, None, :], axis=2)
    tl.store(d_qkv + at, d_q, mask=there & real)
    tl.store(d_qkv + at + H * E, d_keys, mask=there & real)
    tl.store(d_qkv + at + 2 * H * E, d_values, mask=there & real)


def attend(
    qkv: Tensor, shares: Tensor, factor: Tensor | None, hidden: Tensor | None, out: Tensor, children: int, heads: int
) -> None:
    """One level, from rows of queries, keys and values (r, 3 h e) to `shares` and `out` (r, h e)."""
    grid, sizes = _launch(qkv, children, heads)
    flags = {"HIDE": hidden is not None, "DROP": factor is not None}
    attend_families[grid](qkv, shares, factor, hidden, out, **sizes, **flags)


def attend_backward(
    qkv: Tensor, shares: Tensor, factor: Tensor | None, grad: Tensor, d_qkv: Tensor, children: int, heads: int
) -> None:
    """One level, from the gradient of what was read to that of the rows of queries, keys and values."""
    grid, sizes = _launch(qkv, children, heads)
    families_gradient[grid](qkv, shares, factor, grad, d_qkv, **sizes, DROP=factor is not None)


def _launch(qkv: Tensor, children: int, heads: int) -> tuple[tuple[int], dict[str, Any]]:
    e = qkv.shape[1] // (3 * heads)
    kp, hp, ep = (triton.next_power_of_2(size) for size in (children, heads, e))
    families = max(1, CELLS // (hp * kp * kp * ep))
    count = len(qkv) // children
    sizes = {"count": count, "K": children, "H": heads, "E": e, "KP": kp, "HP": hp, "EP": ep, "FAMILIES": families}
    return (-(-count // families),), sizes
