"""The compiled walks of tree attention, forward and backward, over tiles of up to sixteen queries.

Dot products run along the width of one head of one node. Everything between them (softmax, policy, choice, entropy)
runs across the tile: in a row of scores, lane h * count + i belongs to head h of query i, so a small tile fills few
vectors and the mean over heads is a sum of shifted loads.

Kernels take addresses and strides: turning a tensor into a Numba array costs more than answering a query. The type of
`scale` is the type everything is computed in. They release the GIL, so plain Python threads run them side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from retreever.ops.numba_simd import (
    LANES,
    exp,
    fma,
    larger,
    load,
    load_first,
    log,
    pointer,
    splat,
    store,
    store_first,
    total,
    where_equal,
    where_less,
)

_BYTE = np.uint8(0)
_INDEX = np.int64(0)


class Tile(NamedTuple):
    """Sizes of a tile: heads, head width, queries in it, lanes of a score row (a multiple of LANES)."""

    heads: int
    width: int
    count: int
    stride: int


@njit
def _dot(a, i, b, j, width):
    """Sum of a[i + x] * b[j + x] over the width of a head."""
    if width == LANES:
        return total(load(a, i) * load(b, j))
    full = width // LANES * LANES
    part = load_first(a, i + full, width - full) * load_first(b, j + full, width - full)
    for x in range(0, full, LANES):
        part = fma(load(a, i + x), load(b, j + x), part)
    return total(part)


@njit
def _rows(tile, rows, first, children, start, nodes):
    """Note which nodes come next: `children` per query, side by side, from row start + children * nodes[i] on."""
    for c in range(children):
        for i in range(tile.count):
            rows[(first + c) * LANES + i] = start + children * nodes[i] + c


@njit
def _score(tile, scores, rows, first, children, q, nodes, strides, scale):
    """Dot products of every query with its `children` rows."""
    for i in range(tile.count):
        for c in range(first, first + children):
            at = rows[c * LANES + i] * strides[1]
            for h in range(tile.heads):
                dot = _dot(q, (i * tile.heads + h) * tile.width, nodes, at + h * strides[2], tile.width)
                scores[c * tile.stride + h * tile.count + i] = dot * scale


@njit
def _hide(tile, scores, rows, first, children, mask):
    """Set the scores of padding to -inf."""
    for c in range(first, first + children):
        for i in range(tile.count):
            if mask[rows[c * LANES + i]] == 0:
                for h in range(tile.heads):
                    scores[c * tile.stride + h * tile.count + i] = -np.inf


@njit
def _softmax(tile, scores, weights, first, children, scale):
    """Weights of the children of a node, each head for itself."""
    for g in range(0, tile.stride, LANES):
        top = load(scores, first * tile.stride + g)
        for c in range(first + 1, first + children):
            top = larger(top, load(scores, c * tile.stride + g))
        mass = splat(0.0, scale)
        for c in range(children):
            weight = exp(load(scores, (first + c) * tile.stride + g) - top)
            mass = mass + weight
            store(weights, c * tile.stride + g, weight)
        mass = splat(1.0, scale) / mass
        for c in range(children):
            store(weights, c * tile.stride + g, load(weights, c * tile.stride + g) * mass)


@njit
def _policy(tile, weights, c, scale):
    """Probability of child c: the mean of its weight over the heads."""
    mass = load(weights, c * tile.stride)
    for h in range(1, tile.heads):
        mass = mass + load(weights, c * tile.stride + h * tile.count)
    return mass * splat(1 / tile.heads, scale)


@njit
def _choose(tile, weights, logs, uniform, noisy, children, entropy, scale):
    """The child each query descends into: first maximum or inverse CDF. Returns it, its log probability, entropy."""
    zero, one, tiny = splat(0.0, scale), splat(1.0, scale), splat(np.finfo(scale).tiny, scale)
    best, pick, index = zero, zero, zero
    below, reached = zero, zero  # CDF so far; children whose CDF the uniform has passed
    for c in range(children):
        probability = _policy(tile, weights, c, scale)
        log_policy = log(larger(probability, tiny))
        store(logs, c * LANES, log_policy)
        entropy = entropy - probability * log_policy
        if noisy:
            below = below + probability
            reached = reached + where_less(uniform, below, zero, one)
            pick = where_less(zero, probability, index, pick)
        else:
            pick = where_less(best, probability, index, pick)
            best = larger(probability, best)
        index = index + one
    if noisy:
        pick = where_less(reached, pick, reached, pick)  # rounding at the end of the CDF stays on a real child
    log_prob, index = zero, zero
    for c in range(children):
        log_prob = where_equal(pick, index, load(logs, c * LANES), log_prob)
        index = index + one
    return pick, log_prob, entropy


@njit
def _reject(tile, scores, rows, picks, pick, nodes, first, children, scale):
    """Descend: the chosen child leaves the selected set, the last one takes its slot and the next level follows."""
    for h in range(tile.heads):
        store(picks, h * tile.count, pick)  # what spills over is overwritten by the next head
    last = first + children - 1
    index = splat(0.0, scale)
    for c in range(first, last):
        for g in range(0, tile.stride, LANES):
            moved = where_equal(load(picks, g), index, load(scores, last * tile.stride + g), load(scores, c * tile.stride + g))
            store(scores, c * tile.stride + g, moved)
        index = index + splat(1.0, scale)
    for i in range(tile.count):
        c = int(picks[i])
        rows[(first + c) * LANES + i] = rows[last * LANES + i]
        nodes[i] = nodes[i] * children + c


@njit
def _weigh(tile, scores, selected, norm, lse, scale):
    """Scores of the selected set to weights, up to the factor in `norm`."""
    for g in range(0, tile.stride, LANES):
        top = load(scores, g)
        for r in range(1, selected):
            top = larger(top, load(scores, r * tile.stride + g))
        mass = splat(0.0, scale)
        for r in range(selected):
            weight = exp(load(scores, r * tile.stride + g) - top)
            mass = mass + weight
            store(scores, r * tile.stride + g, weight)
        store(norm, g, splat(1.0, scale) / mass)
        store(lse, g, top + log(mass))


@njit
def _read(tile, weights, rows, selected, norm, nodes, strides, output, scale):
    """Weighted sums of `selected` node rows per query."""
    for i in range(tile.count):
        for h in range(tile.heads):
            lane = h * tile.count + i
            for x in range(0, tile.width, LANES):
                acc = splat(0.0, scale)
                at = h * strides[2] + x
                to = (i * tile.heads + h) * tile.width + x
                if tile.width - x >= LANES:
                    for r in range(selected):
                        weight = splat(weights[r * tile.stride + lane], scale)
                        acc = fma(weight, load(nodes, rows[r * LANES + i] * strides[1] + at), acc)
                    store(output, to, acc * splat(norm[lane], scale))
                else:
                    rest = tile.width - x
                    for r in range(selected):
                        weight = splat(weights[r * tile.stride + lane], scale)
                        acc = fma(weight, load_first(nodes, rows[r * LANES + i] * strides[1] + at, rest), acc)
                    store_first(output, to, acc * splat(norm[lane], scale), rest)


@njit
def _forward(
    q, keys, values, mask, noise, output, path, log_prob, entropy, lse, key_strides, value_strides,
    m, heads, width, branch, depth, block, begin, end, scale, real, integer,
):  # fmt: skip
    selected = (branch - 1) * depth + block
    wide = (heads * min(m, LANES) + LANES - 1) // LANES * LANES
    item = real.itemsize
    scores = pointer(real.ctypes.data, scale)
    weights = pointer(real.ctypes.data + item * (selected + 1) * wide, scale)
    picks = pointer(real.ctypes.data + item * ((selected + 1 + branch) * wide + LANES), scale)
    norm = pointer(real.ctypes.data + item * ((selected + 2 + branch) * wide + 2 * LANES), scale)
    lses = pointer(real.ctypes.data + item * ((selected + 3 + branch) * wide + 2 * LANES), scale)
    logs = pointer(real.ctypes.data + item * ((selected + 4 + branch) * wide + 2 * LANES), scale)
    rows = pointer(integer.ctypes.data, _INDEX)
    nodes = pointer(integer.ctypes.data + 8 * LANES * (selected + 1), _INDEX)
    leaf = 0
    power = 1
    for _ in range(depth):
        power *= branch
        leaf += power
    t = leaf + power * block
    p_path = pointer(path, _INDEX)
    p_lp = pointer(log_prob, scale)
    p_ent = pointer(entropy, scale)
    p_noise = pointer(noise, scale)
    p_lse = pointer(lse, scale)
    tiles = (m + LANES - 1) // LANES
    for index in range(begin, end):
        b = index // tiles
        start = index % tiles * LANES
        count = min(LANES, m - start)
        at = b * m + start
        tile = Tile(heads, width, count, (heads * count + LANES - 1) // LANES * LANES)
        p_q = pointer(q + item * at * heads * width, scale)
        p_keys = pointer(keys + item * b * key_strides[0], scale)
        p_values = pointer(values + item * b * value_strides[0], scale)
        p_mask = pointer(mask + b * t, _BYTE)
        p_out = pointer(output + item * at * heads * width, scale)
        ent = splat(0.0, scale)
        lp = splat(0.0, scale)
        for i in range(count):
            nodes[i] = 0
        first = 0
        offset = 0
        power = 1
        for level in range(depth):
            _rows(tile, rows, first, branch, offset, nodes)
            _score(tile, scores, rows, first, branch, p_q, p_keys, key_strides, scale)
            if mask:
                _hide(tile, scores, rows, first, branch, p_mask)
            _softmax(tile, scores, weights, first, branch, scale)
            if noise:
                for i in range(count):
                    picks[i] = p_noise[(at + i) * depth + level]
            pick, gain, ent = _choose(tile, weights, logs, load(picks, 0), noise != 0, branch, ent, scale)
            lp = lp + gain
            _reject(tile, scores, rows, picks, pick, nodes, first, branch, scale)
            first += branch - 1
            power *= branch
            offset += power
        _rows(tile, rows, first, block, leaf, nodes)
        _score(tile, scores, rows, first, block, p_q, p_keys, key_strides, scale)
        if mask:
            _hide(tile, scores, rows, first, block, p_mask)
        _weigh(tile, scores, selected, norm, lses, scale)
        _read(tile, scores, rows, selected, norm, p_values, value_strides, p_out, scale)
        store_first(p_ent, at, ent, count)
        store_first(p_lp, at, lp, count)
        for i in range(count):
            p_path[at + i] = nodes[i]
        if lse:
            for i in range(count):
                for h in range(heads):
                    p_lse[(at + i) * heads + h] = lses[h * count + i]


@njit(nogil=True, cache=True)
def forward(
    q, keys, values, mask, noise, output, path, log_prob, entropy, lse, key_strides, value_strides,
    m, heads, width, branch, depth, block, begin, end, scale,
):  # fmt: skip
    """Search and attend for the tiles begin ... end - 1. `mask`, `noise` and `lse` may be 0: absent."""
    selected = (branch - 1) * depth + block
    wide = (heads * min(m, LANES) + LANES - 1) // LANES * LANES
    real = np.empty((selected + branch + 5) * wide + (branch + 4) * LANES, np.float32)
    integer = np.empty((selected + 2) * LANES, np.int64)
    _forward(
        q, keys, values, mask, noise, output, path, log_prob, entropy, lse, key_strides, value_strides,
        m, heads, width, branch, depth, block, begin, end, scale, real, integer,
    )
