"""Numba kernel of a budgeted search: opens a tree level by level and attends to the nodes that are left.

The heads of a query are lanes of vectors. Every child scored on a level has a cell: its row, its scores and its share
of the attention of the level. Scores of nodes that are left are kept until the attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from retreever.ops.search.forward_numba import BYTE, dot, lanes, leaves
from retreever.ops.search.lanes_numba import LANES, fma, keep_first, kernel, larger, part, put, splat, total
from retreever.ops.search.memory_numba import (
    INDEX,
    claim,
    finish,
    load,
    load_first,
    pointer,
    prefetch,
    store,
    store_first,
)
from retreever.ops.search.series_numba import exp, log


class Nodes(NamedTuple):
    """A tree in memory, and the query that reads it; `counts` and `mask` may be null."""

    q: object
    keys: object
    key_row: int
    key_head: int
    values: object
    value_row: int
    value_head: int
    mask: object
    counts: object
    masked: bool
    counted: bool
    heads: int
    width: int
    scale: object


class Cells(NamedTuple):
    """Children scored on a level."""

    rows: object
    shares: object
    scores: object
    weights: object


@part
def _score(tree, row, scores, at, real):
    """Write the scores of node `row` for all heads to scores[at] and on."""
    bias = type(real)(0)
    if tree.counted:
        bias = tree.counts[row]
    for g in range(0, tree.heads, LANES):
        vector = splat(-np.inf, real)
        for h in range(g, min(tree.heads, g + LANES)):
            product = dot(tree.q, h * tree.width, tree.keys, row * tree.key_row + h * tree.key_head, tree.width)
            vector = put(vector, h - g, product * tree.scale + bias)
        store(scores, at + g, vector)


@part
def _share(tree, cells, count, real):
    """Head mean of the fourth roots of the attention weights among the first `count` cells."""
    stride, quarter = lanes(tree.heads, 1), splat(0.25, real)
    for c in range(count):
        cells.shares[c] = type(real)(0)
    for g in range(0, tree.heads, LANES):
        top, mass = load(cells.scores, g), splat(0.0, real)
        for c in range(1, count):
            top = larger(top, load(cells.scores, c * stride + g))
        for c in range(count):
            root = exp((load(cells.scores, c * stride + g) - top) * quarter)
            store(cells.weights, c * LANES, root)
            mass = mass + root * root * root * root
        norm = keep_first(splat(1 / tree.heads, real) * exp(log(mass) * splat(-0.25, real)), tree.heads - g)
        for c in range(count):
            cells.shares[c] += total(keep_first(load(cells.weights, c * LANES), tree.heads - g) * norm)


@part
def _open(tree, cells, first, count, found, real):
    """Score the real ones of `count` children from row `first` on into cells `found` and on; returns the next cell."""
    stride = lanes(tree.heads, 1)
    for row in range(first, first + count):
        if not tree.masked or tree.mask[row] != 0:
            cells.rows[found] = row
            _score(tree, row, cells.scores, found * stride, real)
            found += 1
    return found


@part
def _rank(shares, count, c):
    """How many cells come before cell `c`: larger share, or the same and earlier."""
    before, mine = 0, shares[c]
    for other in range(c):
        before += shares[other] >= mine
    for other in range(c + 1, count):
        before += shares[other] > mine
    return before


@part
def _attend(tree, scores, rows, used, output, lse, real):
    """Attention over the `used` nodes in `rows` with these scores."""
    heads, width = tree.heads, tree.width
    stride = lanes(heads, 1)
    for g in range(0, heads, LANES):
        top, mass = load(scores, g), splat(0.0, real)
        for s in range(1, used):
            top = larger(top, load(scores, s * stride + g))
        for s in range(used):
            weight = exp(load(scores, s * stride + g) - top)
            store(scores, s * stride + g, weight)
            mass = mass + weight
        norm = splat(1.0, real) / mass
        for s in range(used):
            store(scores, s * stride + g, load(scores, s * stride + g) * norm)
        store_first(lse, g, top + log(mass), min(LANES, heads - g))
    for h in range(heads):
        for x in range(0, width, LANES):
            rest = min(LANES, width - x)
            acc = splat(0.0, real)
            for s in range(used):
                at = rows[s] * tree.value_row + h * tree.value_head + x
                acc = fma(splat(scores[s * stride + h], real), load_first(tree.values, at, rest), acc)
            store_first(output, h * width + x, acc, rest)


@part
def _leave(tree, cells, c, rows, scores, used, real):
    """Keep cell `c` among the nodes to read; its value is on its way when it is needed."""
    stride = lanes(tree.heads, 1)
    rows[used] = cells.rows[c]
    for h in range(tree.heads):
        prefetch(tree.values, rows[used] * tree.value_row + h * tree.value_head)
    for g in range(0, tree.heads, LANES):
        store(scores, used * stride + g, load(cells.scores, c * stride + g))
    return used + 1


@part
def _prefetch(tree, first, count):
    for row in range(first, first + count):
        for h in range(tree.heads):
            prefetch(tree.keys, row * tree.key_row + h * tree.key_head)


@part
def _descend(tree, cells, opened, widths, block_taken, branch, depth, block, blocks, leaf, rows, scores, real):
    """Open the tree below the root level by level. Returns the number of nodes left."""
    below = blocks
    opened[0] = -1
    count, used, offset = 1, 0, 0
    for level in range(depth):
        found, below = 0, below // branch
        for o in range(count):
            found = _open(tree, cells, (opened[o] + 1) * branch, branch, found, real)
        count, width = 0, widths[level]
        if found > width:
            _share(tree, cells, found, real)
        for c in range(found):
            if cells.rows[c] == offset + block_taken // below:
                cells.shares[c] = type(real)(np.inf)
        for c in range(found):
            if found <= width or (count < width and _rank(cells.shares, found, c) < width):  # shares may be NaN
                row = cells.rows[c]
                if level + 1 < depth:
                    _prefetch(tree, (row + 1) * branch, branch)
                else:
                    _prefetch(tree, leaf + (row - offset) * block, block)
                opened[count] = row
                count += 1
            else:
                used = _leave(tree, cells, c, rows, scores, used, real)
        offset = (offset + 1) * branch
    found, last = 0, leaf - blocks if depth else -1
    for o in range(count):
        found = _open(tree, cells, leaf + (opened[o] - last) * block, block, found, real)
    for c in range(found):
        used = _leave(tree, cells, c, rows, scores, used, real)
    return used


@part
def _all_leaves(tree, cells, leaf, stop, rows, scores, real):
    """Keep all real leaves."""
    used = 0
    for row in range(leaf, stop):
        if _open(tree, cells, row, 1, 0, real):
            used = _leave(tree, cells, 0, rows, scores, used, real)
    return used


@kernel
def expand(tensors, key_strides, value_strides, sizes, items, turns, real):
    """Open the tree for every query and attend to what is left; `items` queries, or those claimed.

    Args:
        tensors: addresses of q, keys, values, mask, log counts, path, own depths, table of widths, rows, output, lse; 0
            for no mask, counts or own depths. All but keys and values are contiguous.
        key_strides, value_strides: in numbers; the last axis is contiguous.
        sizes: m, heads, width, branch, depth, block, slots (columns of `rows`), widest (most nodes opened on a level).
        items: number of queries, b * m.
        turns: address of two counters, queries claimed and done, if threads share the work; or 0.
        real: any number of the type to compute in.
    """
    q, keys, values, mask, counts, path, own, table, all_rows, output, lse = tensors
    m, heads, width, branch, depth, block, slots, widest = sizes
    item = np.finfo(real).bits // 8
    stride, most = lanes(heads, 1), widest * max(branch, block)
    leaf, blocks = leaves(branch, depth)
    nodes = leaf + blocks * block
    numbers = np.empty((most + 1) * (1 + LANES) + LANES + (most + slots + 2) * stride, type(real))
    indices = np.empty(most + widest, np.int64)
    base, places = numbers.ctypes.data, indices.ctypes.data
    first = base + item * (most + LANES)
    scores = pointer(first + item * (most + 1) * stride, real)
    weights = pointer(first + item * (most + slots + 2) * stride, real)
    cells = Cells(pointer(places, INDEX), pointer(base, real), pointer(first, real), weights)
    opened = pointer(places + 8 * most, INDEX)
    index = claim(turns, -1)
    while index < items:
        b = index // m
        tree = Nodes(
            pointer(q + item * index * heads * width, real),
            pointer(keys + item * b * key_strides[0], real), key_strides[1], key_strides[2],
            pointer(values + item * b * value_strides[0], real), value_strides[1], value_strides[2],
            pointer(mask + b * nodes, BYTE), pointer(counts + item * b * nodes, real), mask != 0, counts != 0,
            heads, width, type(real)(1 / math.sqrt(width)),
        )  # fmt: skip
        rows = pointer(all_rows + 8 * index * slots, INDEX)
        depth_here = depth
        if own != 0:
            depth_here = pointer(own, INDEX)[b]
        if depth_here < 0:
            used = _all_leaves(tree, cells, leaf, leaf + min(blocks, slots) * block, rows, scores, real)
        else:
            widths = pointer(table + 8 * depth_here * depth, INDEX)
            used = _descend(tree, cells, opened, widths, pointer(path, INDEX)[index], branch, depth, block, blocks,
                            leaf, rows, scores, real)  # fmt: skip
        _attend(tree, scores, rows, used, pointer(output + item * index * heads * width, real),
                pointer(lse + item * index * heads, real), real)  # fmt: skip
        for s in range(used, slots):
            rows[s] = -1
        finish(turns)
        index = claim(turns, index)
