"""Parts of the Triton kernels of one way up a tree: its rows, a token put at its lower end, and log counts."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def way_up(slot, powers, offsets, depth, LEVELS: tl.constexpr):
    """Rows of leaf `slot` and of all nodes above it, from the leaf up, and which of the LEVELS numbers are rows."""
    level = tl.arange(0, LEVELS)
    inside = level <= depth
    place = slot // tl.load(powers + level, mask=inside, other=1)
    return place + tl.load(offsets + level, mask=inside, other=0), inside


@triton.jit
def is_real(real, at):
    """Whether the token is real, as 0 or 1; without a mask all are."""
    return 1 if real is None else tl.load(real + at).to(tl.int32)


@triton.jit
def put_token(nodes, mask, count, token, slot, now, powers, offsets, first, depth, D: tl.constexpr,
              LEVELS: tl.constexpr):  # fmt: skip
    """Write a token on its leaf slot, and the counts and masks of that leaf and of all nodes above it.

    `token` are its D numbers; `now` is 1 if it is real, else 0. `first` is the first row of this tree in the batch.
    """
    row, inside = way_up(slot, powers, offsets, depth, LEVELS)
    before = tl.load(count + first + row, mask=inside, other=0)
    leaf = tl.arange(0, LEVELS) == 0
    after = before + now - tl.sum(tl.where(leaf, before, 0), axis=0)
    tl.debug_barrier()  # every warp has read the counts before one of them writes
    tl.store(count + first + row, after, mask=inside)
    tl.store(mask + first + row, after > 0, mask=inside)
    column = tl.arange(0, D)
    target = nodes + (first + slot + tl.load(offsets)) * D + column
    tl.store(target, tl.load(token + column).to(nodes.dtype.element_ty))


@triton.jit
def write_logs(logs, counted, node, total, key, column, counts_too, there, WIDTH: tl.constexpr, E: tl.constexpr):
    """Write log counts of rows `node` where `counts_too`, and where `there` their keys with log counts behind heads."""
    log = tl.log(tl.maximum(total, 1).to(tl.float32))
    tl.store(logs + node, log.to(logs.dtype.element_ty), mask=counts_too)
    at = counted + node[:, None] * (WIDTH // E * (E + 1)) + (column + column // E)[None, :]
    tl.store(at, key.to(counted.dtype.element_ty), mask=there)
    last = there & (column % E == E - 1)[None, :]
    tl.store(at + 1, log[:, None].to(counted.dtype.element_ty), mask=last)
