"""Triton kernel of a budgeted search: opens a tree level by level, then attends to the nodes that are left.

Letters in capitals are compile-time constants: K branch, B children per node and C cells (padded to powers of two), A
rows attended to at a time, HEADS and WIDTH (h and e), H and E (the same, padded), UNIT of which all strides are
multiples. One program serves one query. On a level every child of every node opened above has a cell, in the order of
rows. Each level waits for the one before, so latency counts: the loop finds rows only, and values are loaded after it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from retreever.ops.search.forward_triton import STRIDES

SIZES = ["m", "depth", "block", "blocks", "leaf_offset", "slots", "count_batch"]
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def node_rows(
    base, rows, inside, row_stride, HEAD_STRIDE: tl.constexpr, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr
):
    """(rows, H, E) float32: keys or values of `rows`; 0 where not inside."""
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :]
    at = base + (rows.to(tl.int64) * row_stride)[:, None, None] + (head * HEAD_STRIDE + lane)[None]
    exists = inside[:, None, None] & ((head < HEADS) & (lane < WIDTH))[None]
    return tl.load(at, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def score_rows(
    q, keys, counts, rows, real, key_row, HEAD_STRIDE: tl.constexpr, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr
):
    """(rows, H) scores of the rows that are real, -inf elsewhere."""
    scores = tl.sum(q[None] * node_rows(keys, rows, real, key_row, HEAD_STRIDE, HEADS, WIDTH, H, E), axis=2)
    if counts is not None:
        scores += tl.load(counts + rows, mask=real, other=0.0)[:, None]
    return tl.where(real[:, None], scores, float("-inf"))


@triton.jit
def real_rows(mask, rows, there):
    """Which rows cover a real token."""
    if mask is not None:
        there &= tl.load(mask + rows, mask=there, other=0).to(tl.int32) != 0
    return there


@triton.jit
def shares_of(scores, real, HEADS: tl.constexpr, H: tl.constexpr):
    """(C,): fourth root of the attention each cell has among all cells, summed over heads; -1 at padding."""
    roots = tl.exp(0.25 * (scores - tl.max(scores, axis=0)[None]))
    squares = roots * roots
    roots = roots / tl.sqrt(tl.sqrt(tl.sum(squares * squares, axis=0)))[None]
    if H != HEADS:
        roots = tl.where((tl.arange(0, H) < HEADS)[None], roots, 0.0)
    return tl.where(real, tl.sum(roots, axis=1), -1.0)


@triton.jit
def pinned(share, PIN: tl.constexpr):
    """The same numbers, computed once.

    The compiler may compute a tensor anew for another layout, with sums in another order; a share would then not be
    equal to itself. It does not do so with assembly that may have effects. (The interpreter has none.)
    """
    if PIN:
        share = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [share], dtype=tl.float32, is_pure=False, pack=1)
    return share


@triton.jit
def opens_of(share, width, C: tl.constexpr):
    """Whether a cell is among the `width` of largest share; of equals the earlier ones are."""
    place = tl.arange(0, C)
    if C <= 128:
        first = (share[None, :] == share[:, None]) & (place[None, :] < place[:, None])
        before = (share[None, :] > share[:, None]) | first
        opens = tl.sum(before.to(tl.int32), axis=1) < width
    else:
        # The bits of numbers from 0 order like them, those of -1 come last; with the place, all are different.
        bits = share.to(tl.int32, bitcast=True).to(tl.int64)
        key = (bits << 32) | (C - 1 - place).to(tl.int64)
        falling = tl.sort(key, descending=True)
        opens = (key >= tl.sum(tl.where(place == width - 1, falling, 0), axis=0)) | (width >= C)
    return opens


@triton.jit
def prefix(flags):
    """How many flags are set up to each place, itself included."""
    return tl.cumsum(flags.to(tl.int32), axis=0)


@triton.jit
def attend(
    q, keys, values, counts, rows_out, used, slots, key_row, value_row, KEY_HEAD: tl.constexpr,
    VALUE_HEAD: tl.constexpr, A: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Attention to the first `used` rows of `rows_out`, and its logsumexp; the other slots become -1."""
    slot = tl.arange(0, A)
    top, mass = tl.full((H,), LOWEST, tl.float32), tl.zeros((H,), tl.float32)
    mixed = tl.zeros((H, E), tl.float32)
    for start in range(0, slots, A):
        real = start + slot < used
        rows = tl.load(rows_out + start + slot, mask=real, other=0)
        scores = score_rows(q, keys, counts, rows, real, key_row, KEY_HEAD, HEADS, WIDTH, H, E)
        v = node_rows(values, rows, real, value_row, VALUE_HEAD, HEADS, WIDTH, H, E)
        new = tl.maximum(top, tl.max(scores, axis=0))
        weight, fade = tl.exp(scores - new[None]), tl.exp(top - new)
        mass = mass * fade + tl.sum(weight, axis=0)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * v, axis=0)
        top = new
        tl.store(rows_out + start + slot, tl.full((A,), -1, tl.int64), mask=(start + slot < slots) & ~real)
    return mixed / mass[:, None], top + tl.log(mass)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def expand(
    q, keys, values, mask, counts, path, own, table, rows_out, output, lse,
    m, depth, block, blocks, leaf_offset, slots, count_batch,
    q_batch, q_row, key_batch, key_row, value_batch, value_row, mask_batch, UNIT: tl.constexpr,
    Q_HEAD: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, A: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    PIN: tl.constexpr,
):  # fmt: skip
    """Rows, attention and logsumexp of the nodes that are left when every level has opened as many as `table` says."""
    index = tl.program_id(0).to(tl.int64)
    batch = index // m
    head, lane, cell = tl.arange(0, H), tl.arange(0, E), tl.arange(0, C)
    inside = (head < HEADS)[:, None] & (lane < WIDTH)[None, :]
    at_q = q + (batch * q_batch + (index % m) * q_row) * UNIT + head[:, None] * Q_HEAD + lane[None, :]
    q_tile = tl.load(at_q, mask=inside, other=0.0).to(tl.float32) * (WIDTH**-0.5)
    keys += batch * key_batch * UNIT
    values += batch * value_batch * UNIT
    rows_out += index * slots
    if mask is not None:
        mask += batch * mask_batch
    if counts is not None:
        counts += batch * count_batch
    own_depth = depth
    if own is not None:
        own_depth = tl.load(own + batch).to(tl.int32)
    everything = own_depth < 0  # all leaves are read, without opening anything
    table += tl.maximum(own_depth, 0) * depth
    taken_block = tl.load(path + index).to(tl.int32)
    key_row, value_row = key_row.to(tl.int64) * UNIT, value_row.to(tl.int64) * UNIT
    parent, parents = tl.full((C,), -1, tl.int32), 1  # parent of every cell: at first the root
    used, first, above, below = 0, 0, -1, blocks
    for level in range(tl.where(everything, 0, depth)):
        rows = first + (parent - above) * K + cell % B
        real = real_rows(mask, rows, (cell // B < parents) & (cell % B < K))
        scores = score_rows(q_tile, keys, counts, rows, real, key_row, KEY_HEAD, HEADS, WIDTH, H, E)
        below = below // K
        share = shares_of(scores, real, HEADS, H)
        share = tl.where(real & (rows == first + taken_block // below), float("inf"), share)
        width = tl.load(table + level)
        opens = opens_of(pinned(share, PIN), width, C) & real
        opened = prefix(opens)
        opens &= opened <= width  # shares may be NaN
        found, seen = parents * K, cell // B * K + cell % B + 1
        if mask is not None:
            seen = prefix(real)
            found = tl.max(seen, axis=0)
        tl.store(rows_out + used + seen - tl.minimum(opened, width) - 1, rows.to(tl.int64), mask=real & ~opens)
        parents = tl.minimum(width, found)
        used += found - parents
        mine = tl.where(opens, opened - 1, -1)[None, :] == (cell // B)[:, None]
        parent = tl.sum(tl.where(mine, rows[None, :], 0), axis=1)
        above = first
        first = (first + 1) * K
    start = 0
    for _ in range(tl.where(everything, tl.cdiv(tl.minimum(blocks, slots), C // B), 1)):
        last = start + cell // B  # block of every cell
        rows = leaf_offset + tl.where(everything, last, parent - above) * block + cell % B
        there = tl.where(everything, last < blocks, cell // B < parents) & (cell % B < block)
        real = real_rows(mask, rows, there)
        tl.store(rows_out + used + prefix(real) - 1, rows.to(tl.int64), mask=real)
        used += tl.sum(real.to(tl.int32), axis=0)
        start += C // B
    tl.debug_barrier()  # the rows are read by other threads
    mixed, log_mass = attend(q_tile, keys, values, counts, rows_out, used, slots, key_row, value_row,
                             KEY_HEAD, VALUE_HEAD, A, HEADS, WIDTH, H, E)  # fmt: skip
    at_out = output + index * (HEADS * WIDTH) + head[:, None] * WIDTH + lane[None, :]
    tl.store(at_out, mixed.to(output.dtype.element_ty), mask=inside)
    tl.store(lse + index * HEADS + head, log_mass, mask=head < HEADS)
