"""Gradients of tree attention along the paths taken, compiled, in two passes.

`backward_scores` works on tiles of queries: it recomputes the scores and from them the gradient of each score, the
attention weight of each value and the gradient of q. `backward_nodes` adds both up in the rows of keys and values: one
thread owns a batch row and head and takes the queries in order. So no two threads write to the same place, and the
result is the same to the last bit for any number of threads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math

import numpy as np

from retreever.ops.search.forward_numba import (
    BYTE,
    Tile,
    dot,
    hide,
    lanes,
    leaves,
    policy,
    read,
    rows_of,
    score,
    softmax,
    spread,
)
from retreever.ops.search.lanes_numba import LANES, fma, kernel, larger, part, splat, where_equal, where_less
from retreever.ops.search.memory_numba import INDEX, claim, finish, load, load_first, pointer, store, store_first
from retreever.ops.search.series_numba import exp


@part
def _trace(tile, rows, nodes, path, branch, depth, block):
    """Write to `rows` all node rows the queries of a tile scored: the children level by level, then the leaves.

    Also writes to rows 1 ... depth of `nodes` which child each query took on every level.
    """
    offset, power = leaves(branch, depth)
    rows_of(tile, rows, depth * branch, block, offset, path)
    for i in range(tile.queries):
        nodes[i] = path[i]
    for level in range(depth - 1, -1, -1):
        offset -= power
        power //= branch
        for i in range(tile.queries):
            parent = nodes[i] // branch
            nodes[(level + 1) * LANES + i] = nodes[i] - parent * branch
            nodes[i] = parent
        rows_of(tile, rows, level * branch, branch, offset, nodes)


@part
def _policy_gradients(tile, weights, gains, picks, grad_log_prob, grad_entropy, children, real):
    """Replace the weights of the children by the gradient of log_prob and entropy with respect to their scores."""
    zero, one, tiny = splat(0.0, real), splat(1.0, real), splat(np.finfo(real).tiny, real)
    pick = load(picks, 0)
    index = zero
    for c in range(children):
        probability, log_policy = policy(tile, weights, c, real)
        live = where_less(probability, tiny, zero, one)  # below tiny the clamped logarithm is constant
        gain = where_equal(pick, index, grad_log_prob * live / larger(probability, tiny), zero)
        spread(tile, gains, c * tile.stride, gain - grad_entropy * (log_policy + live))
        index = index + one
    share = splat(1 / tile.heads, real)
    for g in range(0, tile.stride, LANES):
        mean = zero
        for at in range(g, children * tile.stride, tile.stride):
            mean = fma(load(weights, at), load(gains, at), mean)
        for at in range(g, children * tile.stride, tile.stride):
            store(weights, at, load(weights, at) * (load(gains, at) - mean) * share)


@part
def _score_gradients(tile, shares, gradients, first, children, picks, policies, wanted, lses, deltas, scale, real):
    """Attention weights and score gradients of siblings; the child in `picks` is not attended to.

    On entry `gradients` holds scores and `shares` the products of values and output gradient; on return they hold score
    gradients and attention weights.
    """
    zero, index = splat(0.0, real), splat(0.0, real)
    for c in range(children):
        for g in range(0, tile.stride, LANES):
            at = (first + c) * tile.stride + g
            share = where_equal(load(picks, g), index, zero, exp(load(gradients, at) - load(lses, g)))
            gradient = share * (load(shares, at) - load(deltas, g))
            if wanted:
                gradient = gradient + load(policies, c * tile.stride + g)
            store(shares, at, share)
            store(gradients, at, gradient * splat(scale, real))
        index = index + splat(1.0, real)


@part
def _tile_scores(tile, tensors, at, slot, rows, nodes, reals, key_strides, value_strides, sizes, real):
    """Gradients of one tile: `at` is its first query, counted over the batch, `slot` its index in shares, gradients."""
    q, keys, values, mask, path, output, lse, grad_output, grad_log_prob, grad_entropy, grad_q = tensors[:11]
    shares, gradients = tensors[11:]
    m, heads, width, branch, depth, block = sizes
    met = branch * depth + block
    wide = lanes(heads, min(m, LANES))
    item = np.finfo(real).bits // 8
    scale = type(real)(1 / math.sqrt(width))
    picks, lses = pointer(reals, real), pointer(reals + item * 2 * wide, real)
    deltas = pointer(reals + item * 3 * wide, real)
    weights, gains = pointer(reals + item * 4 * wide, real), pointer(reals + item * (5 + branch) * wide, real)
    leaf, blocks = leaves(branch, depth)
    b = at // m
    offset = item * at * heads * width
    row_keys = pointer(keys + item * b * key_strides[0], real)
    row_values = pointer(values + item * b * value_strides[0], real)
    tile_grad = pointer(grad_output + offset, real)
    tile_shares = pointer(shares + item * slot * met * wide, real)
    tile_gradients = pointer(gradients + item * slot * met * wide, real)
    _trace(tile, rows, nodes, pointer(path + 8 * at, INDEX), branch, depth, block)
    score(tile, tile_gradients, rows, 0, met, pointer(q + offset, real), row_keys, key_strides, scale)
    if mask:
        hide(tile, tile_gradients, rows, 0, met, pointer(mask + b * (leaf + blocks * block), BYTE))
    score(tile, tile_shares, rows, 0, met, tile_grad, row_values, value_strides, type(real)(1))
    for i in range(tile.queries):
        for h in range(heads):
            to = (i * heads + h) * width
            lses[h * tile.queries + i] = pointer(lse, real)[(at + i) * heads + h]
            deltas[h * tile.queries + i] = dot(tile_grad, to, pointer(output + offset, real), to, width)
    wanted = grad_log_prob != 0
    for level in range(depth):
        for i in range(tile.queries):
            picks[i] = nodes[(level + 1) * LANES + i]
        spread(tile, picks, 0, load(picks, 0))
        if wanted:
            softmax(tile, tile_gradients, weights, level * branch, branch, real)
            by_log_prob = load_first(pointer(grad_log_prob, real), at, tile.queries)
            by_entropy = load_first(pointer(grad_entropy, real), at, tile.queries)
            _policy_gradients(tile, weights, gains, picks, by_log_prob, by_entropy, branch, real)
        first = level * branch
        _score_gradients(
            tile, tile_shares, tile_gradients, first, branch, picks, weights, wanted, lses, deltas, scale, real
        )
    for g in range(0, tile.stride, LANES):
        store(picks, g, splat(-1.0, real))  # every leaf is attended to
    first = depth * branch
    _score_gradients(tile, tile_shares, tile_gradients, first, block, picks, weights, False, lses, deltas, scale, real)
    read(tile, tile_gradients, rows, met, row_keys, key_strides, pointer(grad_q + offset, real), real)


@part
def _backward_scores(tensors, key_strides, value_strides, sizes, items, turns, real, scratch):
    m, heads, width, branch, depth, block = sizes
    met, tiles = branch * depth + block, (m + LANES - 1) // LANES
    rows = pointer(scratch.ctypes.data, INDEX)
    nodes = pointer(scratch.ctypes.data + 8 * LANES * met, INDEX)
    reals = scratch.ctypes.data + 8 * LANES * (met + depth + 1)
    index = claim(turns, -1)
    while index < items:
        b, start = index // tiles, index % tiles * LANES
        count = min(LANES, m - start)
        tile = Tile(heads, width, count, lanes(heads, count))
        at = b * m + start
        _tile_scores(tile, tensors, at, index, rows, nodes, reals, key_strides, value_strides, sizes, real)
        finish(turns)
        index = claim(turns, index)


@kernel
def backward_scores(tensors, key_strides, value_strides, sizes, items, turns, real):
    """Gradient of q and, for `backward_nodes`, shares and gradients, tile by tile. Other arguments as in `forward`.

    Args:
        tensors: addresses of q, keys, values, mask, path, output, lse, grad_output, grad_log_prob, grad_entropy,
            grad_q, shares, gradients. The last two are outputs (tiles, node rows, lanes): the attention weight of each
            node row of a tile and the gradient of its score. grad_log_prob and grad_entropy may both be 0.
    """
    m, heads, _, branch, depth, block = sizes
    met = branch * depth + block
    wide = lanes(heads, min(m, LANES))
    item = np.finfo(real).bits // 8
    scratch = np.empty(8 * LANES * (met + depth + 1) + item * (2 * branch + 8) * wide, np.uint8)
    _backward_scores(tensors, key_strides, value_strides, sizes, items, turns, real, scratch)


@part
def _write(tile, weights, rows, met, source, sums, low, high, real):
    """Add each query's `source`, times its weight for the node, to its node rows in `sums`; heads low ... high - 1."""
    size = tile.heads * tile.width
    for i in range(tile.queries):
        for h in range(low, high):
            for x in range(0, tile.width, LANES):
                rest = tile.width - x
                at, lane = h * tile.width + x, h * tile.queries + i
                if rest >= LANES:
                    vector = load(source, i * size + at)
                    for r in range(met):
                        to = rows[r * LANES + i] * size + at
                        weight = splat(weights[r * tile.stride + lane], real)
                        store(sums, to, fma(weight, vector, load(sums, to)))
                else:
                    vector = load_first(source, i * size + at, rest)
                    for r in range(met):
                        to = rows[r * LANES + i] * size + at
                        weight = splat(weights[r * tile.stride + lane], real)
                        store_first(sums, to, fma(weight, vector, load_first(sums, to, rest)), rest)


@part
def _backward_nodes(tensors, sizes, items, turns, real, scratch):
    q, grad_output, path, shares, gradients, grad_keys, grad_values = tensors
    m, heads, width, branch, depth, block, groups = sizes
    met = branch * depth + block
    wide = lanes(heads, min(m, LANES))
    item = np.finfo(real).bits // 8
    leaf, blocks = leaves(branch, depth)
    tiles = (m + LANES - 1) // LANES
    rows = pointer(scratch.ctypes.data, INDEX)
    nodes = pointer(scratch.ctypes.data + 8 * LANES * met, INDEX)
    index = claim(turns, -1)
    while index < items:
        b, group = index // groups, index % groups
        low, high = heads * group // groups, heads * (group + 1) // groups
        size = item * b * (leaf + blocks * block) * heads * width
        row_keys, row_values = pointer(grad_keys + size, real), pointer(grad_values + size, real)
        for slot in range(b * tiles, (b + 1) * tiles):
            start = (slot - b * tiles) * LANES
            count = min(LANES, m - start)
            tile = Tile(heads, width, count, lanes(heads, count))
            at = b * m + start
            offset = item * at * heads * width
            tile_shares = pointer(shares + item * slot * met * wide, real)
            tile_gradients = pointer(gradients + item * slot * met * wide, real)
            _trace(tile, rows, nodes, pointer(path + 8 * at, INDEX), branch, depth, block)
            _write(tile, tile_gradients, rows, met, pointer(q + offset, real), row_keys, low, high, real)
            _write(tile, tile_shares, rows, met, pointer(grad_output + offset, real), row_values, low, high, real)
        finish(turns)
        index = claim(turns, index)


@kernel
def backward_nodes(tensors, sizes, items, turns, real):
    """Add up the gradients of keys and values: an item is a batch row and one of `groups` groups of heads.

    Args:
        tensors: addresses of q, grad_output, path, shares, gradients, grad_keys, grad_values; all contiguous, the last
            two zero on entry.
        sizes: as in `forward`, then groups.
        items, turns, real: as in `forward`.
    """
    _, _, _, branch, depth, block, _ = sizes
    scratch = np.empty(8 * LANES * (branch * depth + block + depth + 1), np.uint8)
    _backward_nodes(tensors, sizes, items, turns, real, scratch)
