"""What surrounds attention in a transformer layer, forward and backward in Triton, for training narrow layers on CUDA.

`project` is LN x and its queries, keys and values; `finish` is everything after attention: output projection, residual,
norm, gated feed-forward, residual. A program takes some rows and does it all: with 64 numbers a row, reading and
writing between single steps is what takes the time. Backward makes again what forward did not keep.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from retreever.nn.product_kernel import times, times_transposed


@triton.jit
def load_rows(base, row, count, STRIDE: tl.constexpr, D: tl.constexpr):
    """The first D columns of rows, zeros beyond the last row."""
    column = tl.arange(0, D)
    return tl.load(base + row[:, None] * STRIDE + column[None, :], mask=(row < count)[:, None], other=0.0)


@triton.jit
def store_rows(base, values, row, count, first, STRIDE: tl.constexpr, D: tl.constexpr):
    """D columns of rows, from column `first` on."""
    column = first + tl.arange(0, D)
    tl.store(base + row[:, None] * STRIDE + column[None, :], values, mask=(row < count)[:, None])


@triton.jit
def standardise(x, eps, D: tl.constexpr):
    """Rows of mean 0 and deviation 1, and the factor that made them so."""
    centred = x - (tl.sum(x, axis=1) / D)[:, None]
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    return centred * scale[:, None], scale


@triton.jit
def standardise_backward(slope, standard, scale, D: tl.constexpr):
    """From the gradient of standardised rows to that of the rows."""
    level, along = tl.sum(slope, axis=1) / D, tl.sum(slope * standard, axis=1) / D
    return (slope - level[:, None] - standard * along[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["count"])
def project_rows(
    x, norm_w, norm_b, w_q, w_kv, normed, q, kv, count, eps,
    D: tl.constexpr, SHARED: tl.constexpr, Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """LN x, queries of it, and keys and values of it (SHARED) or of x."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    tokens = load_rows(x, row, count, D, D)
    standard, _ = standardise(tokens, eps, D)
    own = standard * tl.load(norm_w + column)[None, :] + tl.load(norm_b + column)[None, :]
    store_rows(normed, own, row, count, 0, D, D)
    store_rows(q, times_transposed(own, w_q, column, column, D, PRECISION), row, count, 0, Q_STRIDE, D)
    source = own if SHARED else tokens
    for half in tl.static_range(2):
        part = times_transposed(source, w_kv, column, half * D + column, D, PRECISION)
        store_rows(kv, part, row, count, half * D, KV_STRIDE, D)


@triton.jit(do_not_specialize=["count"])
def project_gradients(
    x, norm_w, w_q, w_kv, extra, d_q, d_keys, d_values, d_x, d_kv, sums, count, eps,
    D: tl.constexpr, SHARED: tl.constexpr, EXTRA: tl.constexpr, STRIDE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and this program's part of that of the norm's weights; KEEP those of keys and values side by side.

    EXTRA is what else depends on "normed" or on "x" itself, with the gradient `extra`; or "nothing".
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    slope = times(load_rows(d_q, row, count, STRIDE, D), w_q, column, column, D, PRECISION)
    if EXTRA == "normed":
        slope += load_rows(extra, row, count, D, D)
    keys, values = load_rows(d_keys, row, count, STRIDE, D), load_rows(d_values, row, count, STRIDE, D)
    if KEEP:
        store_rows(d_kv, keys, row, count, 0, 2 * D, D)
        store_rows(d_kv, values, row, count, D, 2 * D, D)
    raw = times(keys, w_kv, column, column, D, PRECISION) + times(values, w_kv, D + column, column, D, PRECISION)
    if SHARED:
        slope += raw
    standard, scale = standardise(load_rows(x, row, count, D, D), eps, D)
    result = standardise_backward(slope * tl.load(norm_w + column)[None, :], standard, scale, D)
    if not SHARED:
        result += raw
    if EXTRA == "x":
        result += load_rows(extra, row, count, D, D)
    store_rows(d_x, result, row, count, 0, D, D)
    own = sums + tl.program_id(0) * 2 * D + column
    tl.store(own, tl.sum(slope * standard, axis=0))
    tl.store(own + D, tl.sum(slope, axis=0))


@triton.jit
def share_of(counts, row, count, FAMILY: tl.constexpr, COUNTS: tl.constexpr):
    """What each row counts in the mean of its family."""
    if COUNTS:
        return tl.load(counts + row, mask=row < count, other=0.0)
    return tl.where(row < count, 1.0 / FAMILY, 0.0)


@triton.jit
def feed(normed, w_up, b_up, unit, H: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """Of hidden units `unit`: the value, the gate, and the share of the normal distribution below the gate."""
    column = tl.arange(0, D)
    value = times_transposed(normed, w_up, column, unit, D, PRECISION) + tl.load(b_up + unit)[None, :]
    gate = times_transposed(normed, w_up, column, H + unit, D, PRECISION) + tl.load(b_up + H + unit)[None, :]
    return value, gate, 0.5 * (1 + tl.erf(gate * 0.7071067811865476))


@triton.jit(do_not_specialize=["count"])
def finish_rows(
    attended, residual, factor, counts, w_out, b_out, norm_w, norm_b, w_up, b_up, w_down, b_down, added, result, count,
    eps, D: tl.constexpr, H: tl.constexpr, PRE: tl.constexpr, DROP: tl.constexpr, FAMILY: tl.constexpr,
    COUNTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """added = residual + attended @ W_out.T + b_out; result = (added if PRE else LN added) + feed-forward(LN added).

    With a FAMILY of rows the result is that of their mean, in which each row counts as `counts` says.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    total = times_transposed(load_rows(attended, row, count, D, D), w_out, column, column, D, PRECISION)
    total += tl.load(b_out + column)[None, :] + load_rows(residual, row, count, D, D)
    store_rows(added, total, row, count, 0, D, D)
    standard, _ = standardise(total, eps, D)
    normed = standard * tl.load(norm_w + column)[None, :] + tl.load(norm_b + column)[None, :]
    fed = tl.zeros([ROWS, D], tl.float32) + tl.load(b_down + column)[None, :]
    for start in range(0, H, UNITS):
        unit = start + tl.arange(0, UNITS)
        value, gate, below = feed(normed, w_up, b_up, unit, H, D, PRECISION)
        fed += times_transposed(value * gate * below, w_down, unit, column, H, PRECISION)
    if DROP:
        fed *= load_rows(factor, row, count, D, D)
    fed += total if PRE else normed
    if FAMILY == 0:
        store_rows(result, fed, row, count, 0, D, D)
    else:
        fed *= share_of(counts, row, count, FAMILY, COUNTS)[:, None]
        parent = tl.program_id(0).to(tl.int64) * (ROWS // FAMILY) + tl.arange(0, ROWS // FAMILY)
        mean = tl.sum(tl.reshape(fed, [ROWS // FAMILY, FAMILY, D]), axis=1)
        store_rows(result, mean, parent, count // FAMILY, 0, D, D)


@triton.jit(do_not_specialize=["count"])
def finish_gradients(
    grad, added, factor, counts, w_out, norm_w, norm_b, w_up, b_up, w_down,
    d_added, d_attended, d_fed, d_up, normed, gated, sums, count, eps, D: tl.constexpr, H: tl.constexpr,
    PRE: tl.constexpr, DROP: tl.constexpr, FAMILY: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Gradients of residual (`d_added`) and attended; what the gradients of the weights are made of."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    if FAMILY == 0:
        g = load_rows(grad, row, count, D, D)
    else:
        g = (
            load_rows(grad, row // FAMILY, count // FAMILY, D, D)
            * share_of(counts, row, count, FAMILY, COUNTS)[:, None]
        )
    fed = g
    if DROP:
        fed = g * load_rows(factor, row, count, D, D)
    if DROP or FAMILY:
        store_rows(d_fed, fed, row, count, 0, D, D)
    standard, scale = standardise(load_rows(added, row, count, D, D), eps, D)
    norm = tl.load(norm_w + column)[None, :]
    own = standard * norm + tl.load(norm_b + column)[None, :]
    store_rows(normed, own, row, count, 0, D, D)
    slope = tl.zeros([ROWS, D], tl.float32)
    if not PRE:
        slope += g
    for start in range(0, H, UNITS):
        unit = start + tl.arange(0, UNITS)
        value, gate, below = feed(own, w_up, b_up, unit, H, D, PRECISION)
        store_rows(gated, value * gate * below, row, count, start, H, UNITS)
        opened = times(fed, w_down, column, unit, H, PRECISION)
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        d_value, d_gate = opened * gate * below, opened * value * (below + gate * density)
        store_rows(d_up, d_value, row, count, start, 2 * H, UNITS)
        store_rows(d_up, d_gate, row, count, H + start, 2 * H, UNITS)
        slope += times(d_value, w_up, unit, column, D, PRECISION) + times(d_gate, w_up, H + unit, column, D, PRECISION)
    total = standardise_backward(slope * norm, standard, scale, D)
    if PRE:
        total += g
    store_rows(d_added, total, row, count, 0, D, D)
    store_rows(d_attended, times(total, w_out, column, column, D, PRECISION), row, count, 0, D, D)
    place = sums + tl.program_id(0) * 2 * D + column
    tl.store(place, tl.sum(slope * standard, axis=0))
    tl.store(place + D, tl.sum(slope, axis=0))
