"""Numba kernel of the forward pass of tree attention, over tiles of up to sixteen queries; backward shares its parts.

Dot products run along the width of one head of one node. Everything between them (softmax, policy, choice, entropy)
runs across the tile: in a row of scores, lane h * queries + i belongs to head h of query i, so a small tile fills few
vectors and the mean over heads is a sum of shifted loads.

Kernels take addresses and strides: turning a tensor into a Numba array costs more than answering a query. The type of
`real` is the type everything is computed in. They release the GIL, so plain Python threads run them side by side.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from retreever.ops.search.lanes_numba import LANES, fma, kernel, larger, part, splat, total, where_equal, where_less
from retreever.ops.search.memory_numba import INDEX, claim, finish, load, load_first, pointer, store, store_first
from retreever.ops.search.series_numba import exp, log

BYTE = np.uint8(0)


class Tile(NamedTuple):
    """Sizes of a tile: heads, head width, queries in it, lanes in a row of scores (a multiple of LANES)."""

    heads: int
    width: int
    queries: int
    stride: int


@part
def lanes(heads, count):
    """Lanes that hold every head of `count` queries, in whole vectors."""
    return (heads * count + LANES - 1) // LANES * LANES


@part
def leaves(branch, depth):
    """First row of the leaves, and the number of leaf blocks."""
    offset, blocks = 0, 1
    for _ in range(depth):
        blocks *= branch
        offset += blocks
    return offset, blocks


@part
def rows_of(tile, rows, first, children, start, nodes):
    """Write to `rows` the next nodes: `children` per query, side by side, from row start + children * nodes[i] on."""
    for c in range(children):
        for i in range(tile.queries):
            rows[(first + c) * LANES + i] = start + children * nodes[i] + c


@part
def dot(a, i, b, j, width):
    """Sum of a[i + x] * b[j + x] over the width of a head."""
    if width == LANES:
        return total(load(a, i) * load(b, j))
    full = width // LANES * LANES
    sums = load_first(a, i + full, width - full) * load_first(b, j + full, width - full)
    for x in range(0, full, LANES):
        sums = fma(load(a, i + x), load(b, j + x), sums)
    return total(sums)


@part
def score(tile, scores, rows, first, stop, q, nodes, strides, scale):
    """Scaled dot products of every query with its node rows first ... stop - 1."""
    for i in range(tile.queries):
        for r in range(first, stop):
            at = rows[r * LANES + i] * strides[1]
            for h in range(tile.heads):
                product = dot(q, (i * tile.heads + h) * tile.width, nodes, at + h * strides[2], tile.width)
                scores[r * tile.stride + h * tile.queries + i] = product * scale


@part
def hide(tile, scores, rows, first, stop, mask):
    """Set the score of padding to -inf and its row to that of a real node, since padding may hold NaN."""
    for i in range(tile.queries):
        real_row = rows[first * LANES + i]
        for r in range(first, stop):
            if mask[rows[r * LANES + i]]:
                real_row = rows[r * LANES + i]
        for r in range(first, stop):
            if mask[rows[r * LANES + i]] == 0:
                rows[r * LANES + i] = real_row
                for h in range(tile.heads):
                    scores[r * tile.stride + h * tile.queries + i] = -np.inf


@part
def softmax(tile, scores, weights, first, children, real):
    """Attention weights among the children of a node, per head."""
    for g in range(0, tile.stride, LANES):
        top = load(scores, first * tile.stride + g)
        for c in range(first + 1, first + children):
            top = larger(top, load(scores, c * tile.stride + g))
        mass = splat(0.0, real)
        for c in range(children):
            weight = exp(load(scores, (first + c) * tile.stride + g) - top)
            mass = mass + weight
            store(weights, c * tile.stride + g, weight)
        mass = splat(1.0, real) / mass
        for c in range(children):
            store(weights, c * tile.stride + g, load(weights, c * tile.stride + g) * mass)


@part
def policy(tile, weights, c, real):
    """Probability of child c (the mean of its weight over the heads), and its logarithm, clamped to be finite at 0."""
    mass = load(weights, c * tile.stride)
    for h in range(1, tile.heads):
        mass = mass + load(weights, c * tile.stride + h * tile.queries)
    probability = mass * splat(1 / tile.heads, real)
    return probability, log(larger(splat(np.finfo(real).tiny, real), probability))  # in this order NaN stays NaN


@part
def _choose(tile, scores, weights, logs, first, uniform, noisy, forced, children, real):
    """The child each query descends into, its log probability, and the entropy of the policy.

    The child is `forced` where that is a real child; else the first most likely one or, if `noisy`, by inverse CDF.
    """
    zero, one = splat(0.0, real), splat(1.0, real)
    best, pick, index, entropy = zero, zero, zero, zero
    below, passed = zero, zero  # CDF so far; number of children whose CDF does not exceed the uniform
    for c in range(children):
        probability, log_policy = policy(tile, weights, c, real)
        store(logs, c * LANES, log_policy)
        entropy = entropy - probability * log_policy
        if noisy:
            below = below + probability
            passed = passed + where_less(uniform, below, zero, one)
            pick = where_less(zero, probability, index, pick)
        else:
            pick = where_less(best, probability, index, pick)
            best = larger(probability, best)
        index = index + one
    if noisy:
        pick = where_less(passed, pick, passed, pick)  # a uniform above the rounded CDF takes the last real child
    index, lowest = zero, splat(-np.inf, real)
    for c in range(children):
        is_real = where_less(lowest, load(scores, (first + c) * tile.stride), index, pick)  # of the first head
        pick = where_equal(forced, index, is_real, pick)
        index = index + one
    log_prob, index = zero, zero
    for c in range(children):
        log_prob = where_equal(pick, index, load(logs, c * LANES), log_prob)
        index = index + one
    return pick, log_prob, entropy


@part
def spread(tile, row, at, per_query):
    """Repeat one number per query for every head, from row[at] on; each store overwrites the excess of the last."""
    for h in range(tile.heads):
        store(row, at + h * tile.queries, per_query)


@part
def _descend(tile, scores, rows, picks, nodes, first, children, real):
    """Remove the chosen child from the selected set (the last child takes its slot) and descend into it."""
    last = first + children - 1
    index = splat(0.0, real)
    for c in range(first, last):
        for g in range(0, tile.stride, LANES):
            kept, moved = load(scores, c * tile.stride + g), load(scores, last * tile.stride + g)
            store(scores, c * tile.stride + g, where_equal(load(picks, g), index, moved, kept))
        index = index + splat(1.0, real)
    for i in range(tile.queries):
        c = int(picks[i])
        rows[(first + c) * LANES + i] = rows[last * LANES + i]
        nodes[i] = nodes[i] * children + c


@part
def _weigh(tile, scores, selected, lse, real):
    """Replace the scores of the selected set by attention weights; write their log-sum-exp to `lse`."""
    for g in range(0, tile.stride, LANES):
        top = load(scores, g)
        for r in range(1, selected):
            top = larger(top, load(scores, r * tile.stride + g))
        mass = splat(0.0, real)
        for r in range(selected):
            weight = exp(load(scores, r * tile.stride + g) - top)
            mass = mass + weight
            store(scores, r * tile.stride + g, weight)
        norm = splat(1.0, real) / mass
        for r in range(selected):  # before the sum over values, which could overflow with unnormalised weights
            store(scores, r * tile.stride + g, load(scores, r * tile.stride + g) * norm)
        store(lse, g, top + log(mass))


@part
def read(tile, weights, rows, selected, nodes, strides, output, real):
    """Weighted sum of the `selected` node rows of every query."""
    for i in range(tile.queries):
        for h in range(tile.heads):
            lane = h * tile.queries + i
            for x in range(0, tile.width, LANES):
                at = h * strides[2] + x
                to = (i * tile.heads + h) * tile.width + x
                rest = tile.width - x
                acc = splat(0.0, real)
                if rest >= LANES:
                    for r in range(selected):
                        weight = splat(weights[r * tile.stride + lane], real)
                        acc = fma(weight, load(nodes, rows[r * LANES + i] * strides[1] + at), acc)
                    store(output, to, acc)
                else:
                    for r in range(selected):
                        weight = splat(weights[r * tile.stride + lane], real)
                        acc = fma(weight, load_first(nodes, rows[r * LANES + i] * strides[1] + at, rest), acc)
                    store_first(output, to, acc, rest)


@part
def _forward(tensors, key_strides, value_strides, sizes, items, turns, real, scratch):
    q, keys, values, mask, noise, choices, output, path, log_prob, entropy, lse = tensors
    m, heads, width, branch, depth, block = sizes
    selected = (branch - 1) * depth + block
    wide = lanes(heads, min(m, LANES))
    item = np.finfo(real).bits // 8
    scale = type(real)(1 / math.sqrt(width))
    # Rows of lanes that are loaded or stored at an offset are followed by a spare row: vectors extend past the end.
    rows = pointer(scratch.ctypes.data, INDEX)
    nodes = pointer(scratch.ctypes.data + 8 * LANES * (selected + 1), INDEX)
    reals = scratch.ctypes.data + 8 * LANES * (selected + 2)
    scores = pointer(reals, real)
    weights = pointer(reals + item * wide * (selected + 1), real)
    picks = pointer(reals + item * wide * (selected + 2 + branch), real)
    forced = pointer(reals + item * wide * (selected + 4 + branch), real)
    lses = pointer(reals + item * wide * (selected + 5 + branch), real)
    logs = pointer(reals + item * wide * (selected + 6 + branch), real)
    leaf, blocks = leaves(branch, depth)
    tiles = (m + LANES - 1) // LANES
    index = claim(turns, -1)
    while index < items:
        b, start = index // tiles, index % tiles * LANES
        count = min(LANES, m - start)
        tile = Tile(heads, width, count, lanes(heads, count))
        at = b * m + start
        tile_q = pointer(q + item * at * heads * width, real)
        row_keys = pointer(keys + item * b * key_strides[0], real)
        row_values = pointer(values + item * b * value_strides[0], real)
        row_mask = pointer(mask + b * (leaf + blocks * block), BYTE)
        uniforms = pointer(noise + item * at * depth, real)
        given = pointer(choices + item * at * depth, real)
        store(forced, 0, splat(-1.0, real))
        sum_log_prob, sum_entropy = splat(0.0, real), splat(0.0, real)
        for i in range(count):
            nodes[i] = 0
        first, offset, power = 0, 0, 1
        for level in range(depth):
            rows_of(tile, rows, first, branch, offset, nodes)
            score(tile, scores, rows, first, first + branch, tile_q, row_keys, key_strides, scale)
            if mask:
                hide(tile, scores, rows, first, first + branch, row_mask)
            softmax(tile, scores, weights, first, branch, real)
            if noise:
                for i in range(count):
                    picks[i] = uniforms[i * depth + level]
            if choices:
                for i in range(count):
                    forced[i] = given[i * depth + level]
            pick, level_log_prob, level_entropy = _choose(
                tile, scores, weights, logs, first, load(picks, 0), noise != 0, load(forced, 0), branch, real
            )
            sum_log_prob, sum_entropy = sum_log_prob + level_log_prob, sum_entropy + level_entropy
            spread(tile, picks, 0, pick)
            _descend(tile, scores, rows, picks, nodes, first, branch, real)
            first, power = first + branch - 1, power * branch
            offset += power
        rows_of(tile, rows, first, block, leaf, nodes)
        score(tile, scores, rows, first, selected, tile_q, row_keys, key_strides, scale)
        if mask:
            hide(tile, scores, rows, first, selected, row_mask)
        _weigh(tile, scores, selected, lses, real)
        tile_output = pointer(output + item * at * heads * width, real)
        read(tile, scores, rows, selected, row_values, value_strides, tile_output, real)
        store_first(pointer(log_prob, real), at, sum_log_prob, count)
        store_first(pointer(entropy, real), at, sum_entropy, count)
        for i in range(count):
            pointer(path, INDEX)[at + i] = nodes[i]
            if lse:
                for h in range(heads):
                    pointer(lse, real)[(at + i) * heads + h] = lses[h * count + i]
        finish(turns)
        index = claim(turns, index)


@kernel
def forward(tensors, key_strides, value_strides, sizes, items, turns, real):
    """Search and attend for all tiles of queries, b * ceil(m / LANES) of them, or for those this thread claims.

    Args:
        tensors: addresses of q, keys, values, mask, noise, choices, output, path, log_prob, entropy, lse. All but keys
            and values are contiguous; 0 stands for no mask, no noise (take the most likely child), no choices, no lse
            wanted. Choices are numbers of the type of `real`, -1 where the policy decides.
        key_strides, value_strides: in numbers; the last axis is contiguous.
        sizes: m, heads, width, branch, depth, block.
        items: number of tiles.
        turns: address of two counters, tiles claimed and tiles done, if threads share the work; or 0.
        real: any number of the type to compute in.
    """
    m, heads, _, branch, depth, block = sizes
    selected = (branch - 1) * depth + block
    wide = lanes(heads, min(m, LANES))
    item = np.finfo(real).bits // 8
    numbers = (selected + branch + 8) * wide + (branch + 1) * LANES
    scratch = np.empty(8 * LANES * (selected + 2) + item * numbers, np.uint8)
    _forward(tensors, key_strides, value_strides, sizes, items, turns, real, scratch)
