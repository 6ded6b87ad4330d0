"""Triton kernel of a budgeted search: opens a tree level by level and attends to the nodes that are left.

Letters in capitals are compile-time constants: K branch, B children per node and C cells (padded to powers of two),
HEADS and WIDTH (h and e), H and E (the same, padded). One program serves one query. On a level every child of every
node opened above has a cell, in the order of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from retreever.ops.search.forward_triton import STRIDES

SIZES = ["m", "depth", "block", "blocks", "leaf_offset", "nodes", "slots"]
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def score_cells(
    q, keys, mask, counts, rows, there, key_row,
    KEY_HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Whether each cell holds a real node, and its scores (C, H), -inf elsewhere."""
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :]
    real = there
    if mask is not None:
        real &= tl.load(mask + rows, mask=there, other=0).to(tl.int32) != 0
    inside = real[:, None, None] & ((head < HEADS) & (lane < WIDTH))[None]
    at = keys + rows.to(tl.int64)[:, None, None] * key_row + (head * KEY_HEAD + lane)[None]
    scores = tl.sum(q[None] * tl.load(at, mask=inside, other=0.0).to(tl.float32), axis=2)
    if counts is not None:
        scores += tl.load(counts + rows, mask=real, other=0.0)[:, None]
    return real, tl.where(real[:, None], scores, float("-inf"))


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
def prefix(flags, C: tl.constexpr):
    """How many flags are set up to each place, itself included."""
    return tl.cumsum(flags.to(tl.int32), axis=0)


@triton.jit
def read_cells(
    values, rows, left, scores, top, mass, mixed, rows_out, used, value_row,
    VALUE_HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Add the cells that are `left` to the attention, and their rows to `rows_out`."""
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :]
    inside = left[:, None, None] & ((head < HEADS) & (lane < WIDTH))[None]
    at = values + rows.to(tl.int64)[:, None, None] * value_row + (head * VALUE_HEAD + lane)[None]
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(left[:, None], scores, float("-inf"))
    new = tl.maximum(top, tl.max(kept, axis=0))
    weight, fade = tl.exp(kept - new[None]), tl.exp(top - new)
    mass = mass * fade + tl.sum(weight, axis=0)
    mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * v, axis=0)
    tl.store(rows_out + used + prefix(left, C) - 1, rows.to(tl.int64), mask=left)
    return new, mass, mixed, used + tl.sum(left.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def expand(
    q, keys, values, mask, counts, path, own, table, rows_out, output, lse, shares,
    m, depth, block, blocks, leaf_offset, nodes, slots,
    q_batch, q_row, key_batch, key_row, value_batch, value_row,
    Q_HEAD: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Rows, attention and logsumexp of the nodes that are left when every level has opened as many as `table` says."""
    index = tl.program_id(0).to(tl.int64)
    batch = index // m
    head, lane, cell = tl.arange(0, H), tl.arange(0, E), tl.arange(0, C)
    inside = (head < HEADS)[:, None] & (lane < WIDTH)[None, :]
    at_q = q + batch * q_batch + (index % m) * q_row + head[:, None] * Q_HEAD + lane[None, :]
    q_tile = tl.load(at_q, mask=inside, other=0.0).to(tl.float32) * (WIDTH**-0.5)
    keys += batch * key_batch
    values += batch * value_batch
    rows_out += index * slots
    if mask is not None:
        mask += batch * nodes
    if counts is not None:
        counts += batch * nodes
    own_depth = depth
    if own is not None:
        own_depth = tl.load(own + batch).to(tl.int32)
    everything = own_depth < 0  # all leaves are read, without opening anything
    table += tl.maximum(own_depth, 0) * depth
    taken_block = tl.load(path + index).to(tl.int32)
    key_row, value_row = key_row.to(tl.int64), value_row.to(tl.int64)
    top, mass = tl.full((H,), LOWEST, tl.float32), tl.zeros((H,), tl.float32)
    mixed = tl.zeros((H, E), tl.float32)
    parent, opened = tl.full((C,), -1, tl.int32), cell < B  # parent of every cell: at first the root
    used, first, above, below = 0, 0, -1, blocks
    for level in range(tl.where(everything, 0, depth)):
        rows = first + (parent - above) * K + cell % B
        real, scores = score_cells(
            q_tile, keys, mask, counts, rows, opened & (cell % B < K), key_row, KEY_HEAD, HEADS, WIDTH, H, E
        )
        share = tl.exp(scores - tl.max(scores, axis=0)[None])
        share = tl.where((head < HEADS)[None], share / tl.sum(share, axis=0)[None], 0.0)
        below = below // K
        share = tl.where(real, tl.sum(share, axis=1), -1.0)
        share = tl.where(real & (rows == first + taken_block // below), float("inf"), share)
        # Through memory: the compiler may compute a tensor anew for another layout, with sums in another order, and
        # then a share is not equal to itself.
        at = shares + (index * depth + level) * C + cell
        tl.store(at, share)
        tl.debug_barrier()
        width = tl.load(table + level)
        opens = opens_of(tl.load(at), width, C) & real
        count = prefix(opens, C)
        opens &= count <= width  # shares may be NaN
        top, mass, mixed, used = read_cells(
            values, rows, real & ~opens, scores, top, mass, mixed, rows_out, used, value_row,
            VALUE_HEAD, HEADS, WIDTH, H, E, C,
        )  # fmt: skip
        place = tl.where(opens, count - 1, -1)
        mine = place[None, :] == (cell // B)[:, None]
        parent = tl.sum(tl.where(mine, rows[None, :], 0), axis=1)
        opened = cell // B < tl.sum(opens.to(tl.int32), axis=0)
        above = first
        first = (first + 1) * K
    start = 0
    for _ in range(tl.where(everything, tl.cdiv(tl.minimum(blocks, slots), C // B), 1)):
        last = start + cell // B  # block of every cell
        rows = leaf_offset + tl.where(everything, last, parent - above) * block + cell % B
        there = tl.where(everything, last < blocks, opened) & (cell % B < block)
        real, scores = score_cells(q_tile, keys, mask, counts, rows, there, key_row, KEY_HEAD, HEADS, WIDTH, H, E)
        top, mass, mixed, used = read_cells(
            values, rows, real, scores, top, mass, mixed, rows_out, used, value_row,
            VALUE_HEAD, HEADS, WIDTH, H, E, C,
        )  # fmt: skip
        start += C // B
    for empty in range(used, slots, C):
        tl.store(rows_out + empty + cell, -1, mask=empty + cell < slots)
    at_out = output + index * (HEADS * WIDTH) + head[:, None] * WIDTH + lane[None, :]
    tl.store(at_out, (mixed / mass[:, None]).to(output.dtype.element_ty), mask=inside)
    tl.store(lse + index * HEADS + head, top + tl.log(mass), mask=head < HEADS)
