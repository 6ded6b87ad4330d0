"""Triton kernels of softmax attention and its gradients, for training on CUDA: masks, narrow heads, any lengths.

Of torch's kernels only the one that runs in float32 without tensor cores takes masks. These read a mask of real tokens
and multiply in tf32 (in three passes where float32 precision is requested) or half precision.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

QUERIES, KEYS = 64, 64  # rows of a tile
LOG2E = 1.4426950408889634


@triton.jit
def rows_of(base, index, count, stride, E: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `index` of a matrix of `count` rows; zeros where `index` >= `count`."""
    column = tl.arange(0, WIDTH)
    inside = (index < count)[:, None] & (column < E)[None, :]
    return tl.load(base + index[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def scores_of(q, k, mask, batch, mask_stride, key, n, scale, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of queries against a tile of keys, in units of log 2; minus infinity where there is no token."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    real = key < n
    if HAS_MASK:
        real = real & (tl.load(mask + batch * mask_stride + key, mask=key < n, other=0) != 0)
    return tl.where(real[None, :], s, float("-inf"))


@triton.jit(do_not_specialize=["m", "n"])
def attend(
    q, k, v, mask, out, lse, m, n, scale, heads, mask_stride, qb, qm, qh, kb, kn, kh, vb, vn, vh,
    E: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries of one head over all keys, by an online softmax."""
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    queries = rows_of(q + batch * qb + head * qh, query, m, qm, E, WIDTH)
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, WIDTH], tl.float32)
    for start in range(0, n, BN):
        key = start + tl.arange(0, BN)
        keys = rows_of(k + batch * kb + head * kh, key, n, kn, E, WIDTH)
        values = rows_of(v + batch * vb + head * vh, key, n, vn, E, WIDTH)
        s = scores_of(queries, keys, mask, batch, mask_stride, key, n, scale, HAS_MASK, PRECISION)
        higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no real token so far: exp2(-inf - 0) is 0
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, axis=1)
        sums = sums * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = higher
    column = tl.arange(0, WIDTH)
    cells = ((batch * m + query[:, None]) * heads + head) * E + column[None, :]
    inside = (query < m)[:, None] & (column < E)[None, :]
    tl.store(out + cells, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + (batch * heads + head) * m + query, top + tl.log2(total), mask=query < m)


@triton.jit(do_not_specialize=["m", "n"])
def query_gradient(
    q, k, v, mask, out, lse, grad, grad_q, delta, m, n, scale, heads, mask_stride, qb, qm, qh, kb, kn, kh, vb, vn, vh,
    E: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries; also stores delta = sum(grad * out), which `key_value_gradient` reads."""
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    queries = rows_of(q + batch * qb + head * qh, query, m, qm, E, WIDTH)
    corner = batch * m * heads * E + head * E
    g = rows_of(grad + corner, query, m, heads * E, E, WIDTH)
    o = rows_of(out + corner, query, m, heads * E, E, WIDTH)
    level = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    row = (batch * heads + head) * m + query
    tl.store(delta + row, level, mask=query < m)
    whole = tl.load(lse + row, mask=query < m, other=0.0)
    result = tl.zeros([BM, WIDTH], tl.float32)
    for start in range(0, n, BN):
        key = start + tl.arange(0, BN)
        keys = rows_of(k + batch * kb + head * kh, key, n, kn, E, WIDTH)
        values = rows_of(v + batch * vb + head * vh, key, n, vn, E, WIDTH)
        s = scores_of(queries, keys, mask, batch, mask_stride, key, n, scale, HAS_MASK, PRECISION)
        p = tl.exp2(s - whole[:, None])
        change = p * (tl.dot(g, tl.trans(values), input_precision=PRECISION) - level[:, None])
        result += tl.dot(change.to(keys.dtype), keys, input_precision=PRECISION)
    column = tl.arange(0, WIDTH)
    cells = corner + query[:, None] * heads * E + column[None, :]
    inside = (query < m)[:, None] & (column < E)[None, :]
    result = result * (scale / 1.4426950408889634)
    tl.store(grad_q + cells, result.to(grad_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "n"])
def key_value_gradient(
    q, k, v, mask, lse, grad, delta, grad_k, grad_v, m, n, scale, heads, mask_stride, qb, qm, qh, kb, kn, kh, vb, vn,
    vh, E: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values over all queries."""
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    keys = rows_of(k + batch * kb + head * kh, key, n, kn, E, WIDTH)
    values = rows_of(v + batch * vb + head * vh, key, n, vn, E, WIDTH)
    corner = batch * m * heads * E + head * E
    sum_k, sum_v = tl.zeros([BN, WIDTH], tl.float32), tl.zeros([BN, WIDTH], tl.float32)
    for start in range(0, m, BM):
        query = start + tl.arange(0, BM)
        queries = rows_of(q + batch * qb + head * qh, query, m, qm, E, WIDTH)
        g = rows_of(grad + corner, query, m, heads * E, E, WIDTH)
        row = (batch * heads + head) * m + query
        whole = tl.load(lse + row, mask=query < m, other=float("inf"))  # weight 0 beyond the last query
        level = tl.load(delta + row, mask=query < m, other=0.0)
        s = scores_of(queries, keys, mask, batch, mask_stride, key, n, scale, HAS_MASK, PRECISION)
        p = tl.exp2(s - whole[:, None])
        sum_v += tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION)
        change = p * (tl.dot(g, tl.trans(values), input_precision=PRECISION) - level[:, None])
        sum_k += tl.dot(tl.trans(change.to(queries.dtype)), queries, input_precision=PRECISION)
    column = tl.arange(0, WIDTH)
    cells = ((batch * n + key[:, None]) * heads + head) * E + column[None, :]
    inside = (key < n)[:, None] & (column < E)[None, :]
    sum_k = sum_k * (scale / 1.4426950408889634)
    tl.store(grad_k + cells, sum_k.to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + cells, sum_v.to(grad_v.dtype.element_ty), mask=inside)
