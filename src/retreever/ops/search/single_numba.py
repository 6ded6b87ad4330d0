"""Numba kernel of the forward pass for one query per batch row; it keeps the state of a level in registers.

The heads of the query are the lanes of one vector. While a level is scored, the keys of the next level are prefetched
under all children. Logarithms are taken together after the walk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math

import numpy as np

from retreever.ops.search.lanes_numba import LANES, fma, keep_first, kernel, larger, put, splat, step, total
from retreever.ops.search.memory_numba import INDEX, load, load_first, pointer, prefetch, room, store, store_first
from retreever.ops.search.series_numba import exp, log

AHEAD = 8  # most rows of keys to prefetch per level


@step
def _scores(q, keys, at, stride, heads, width, scale):
    """Scores of the node whose key starts at keys[at], one lane per head."""
    row = splat(0.0, scale)
    for h in range(heads):
        a, b = h * width, at + h * stride
        if width == LANES:
            product = total(load(q, a) * load(keys, b))
        else:
            full = width // LANES * LANES
            sums = load_first(q, a + full, width - full) * load_first(keys, b + full, width - full)
            for x in range(0, full, LANES):
                sums = fma(load(q, a + x), load(keys, b + x), sums)
            product = total(sums)
        row = put(row, h, product * scale)
    return row


@step
def _walk(q, keys, strides, place, sizes, scale, real):
    """Walk from the root to a leaf block; returns the block.

    Writes to `place` the scores and rows of the selected set and the probabilities of all children scored and taken.
    """
    scores, weights, rows, policies, taken = place
    heads, width, branch, depth, block = sizes
    node, offset, power, at = 0, 0, 1, 0
    for level in range(depth):
        row = offset + node * branch
        power *= branch
        offset += power
        below = branch if level + 1 < depth else block
        for r in range(min(branch * below, AHEAD)):
            for h in range(heads):
                prefetch(keys, (offset + node * branch * below + r) * strides[1] + h * strides[2])
        top, mass = splat(-np.inf, real), splat(0.0, real)
        for c in range(branch):
            child_scores = _scores(q, keys, (row + c) * strides[1], strides[2], heads, width, scale)
            store(scores, (at + c) * LANES, child_scores)
            top = larger(top, child_scores)
        for c in range(branch):
            weight = exp(load(scores, (at + c) * LANES) - top)
            store(weights, c * LANES, weight)
            mass = mass + weight
        mass = keep_first(splat(1 / heads, real) / mass, heads)
        best, pick, last = type(real)(0), 0, at + branch - 1
        for c in range(branch):
            probability = total(load(weights, c * LANES) * mass)
            policies[level * branch + c] = probability
            rows[at + c] = row + c
            pick = c if probability > best else pick
            best = max(probability, best)
        taken[level] = policies[level * branch + pick]
        # Remove the child taken from the selected set: the last child gets its slot.
        store(scores, (at + pick) * LANES, load(scores, last * LANES))
        rows[at + pick] = rows[last]
        node, at = node * branch + pick, last
    for c in range(block):
        rows[at + c] = offset + node * block + c
        store(scores, (at + c) * LANES, _scores(q, keys, rows[at + c] * strides[1], strides[2], heads, width, scale))
    return node


@step
def _weigh(scores, selected, real):
    """Replace the scores of the selected set by attention weights."""
    top, mass = load(scores, 0), splat(0.0, real)
    for r in range(1, selected):
        top = larger(top, load(scores, r * LANES))
    for r in range(selected):
        weight = exp(load(scores, r * LANES) - top)
        store(scores, r * LANES, weight)
        mass = mass + weight
    norm = splat(1.0, real) / mass
    for r in range(selected):
        store(scores, r * LANES, load(scores, r * LANES) * norm)


@step
def _read(weights, rows, selected, values, strides, heads, width, output, real):
    """Write the weighted sum of the `selected` value rows to `output`."""
    for h in range(heads):
        for x in range(0, width, LANES):
            rest = min(LANES, width - x)
            acc = splat(0.0, real)
            for r in range(selected):
                weight = splat(weights[r * LANES + h], real)
                acc = fma(weight, load_first(values, rows[r] * strides[1] + h * strides[2] + x, rest), acc)
            store_first(output, h * width + x, acc, rest)


@step
def _sums_of_logs(numbers, count, real):
    """Sums of log x and of -x log x."""
    logs, entropy, tiny = splat(0.0, real), splat(0.0, real), splat(np.finfo(real).tiny, real)
    for x in range(0, count, LANES):
        x_values = load_first(numbers, x, min(LANES, count - x))
        x_logs = keep_first(log(larger(tiny, x_values)), count - x)
        logs = logs + x_logs
        entropy = entropy - x_values * x_logs
    return total(logs), total(entropy)


@kernel
def forward_single(tensors, strides, sizes, items, _turns, real):
    """Search and attend for one query in each of `items` rows, without mask, noise and lse.

    Args:
        tensors: addresses of q, keys, values, output, path, log_prob, entropy; all but keys and values are contiguous.
        strides: of both keys and values, in numbers; the last axis is contiguous.
        sizes: heads (up to LANES), width, branch, depth, block; fewer than ROOM tokens to attend to.
        items: number of rows.
        real: any number of the type to compute in.
    """
    q, keys, values, output, path, log_prob, entropy = tensors
    heads, width, branch, depth, block = sizes
    selected = (branch - 1) * depth + block
    item = np.finfo(real).bits // 8
    scale = type(real)(1 / math.sqrt(width))
    scores, weights, rows, policies, taken = room(real), room(real), room(INDEX), room(real), room(real)
    for b in range(items):
        b_q, b_output = pointer(q + item * b * heads * width, real), pointer(output + item * b * heads * width, real)
        b_keys, b_values = pointer(keys + item * b * strides[0], real), pointer(values + item * b * strides[0], real)
        place = (scores, weights, rows, policies, taken)
        pointer(path, INDEX)[b] = _walk(b_q, b_keys, strides, place, sizes, scale, real)
        _weigh(scores, selected, real)
        _read(scores, rows, selected, b_values, strides, heads, width, b_output, real)
        pointer(log_prob, real)[b] = _sums_of_logs(taken, depth, real)[0]
        pointer(entropy, real)[b] = _sums_of_logs(policies, depth * branch, real)[1]
