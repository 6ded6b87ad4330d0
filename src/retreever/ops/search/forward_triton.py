"""Triton kernels of tree attention: the pass down the tree, and functions shared with the gradients.

Letters in capitals are compile-time constants: K branch, HEADS and WIDTH (h and e), H and E (the same, padded to powers
of two), M queries per tile, C children per tile. A tile of node rows is (M, C, H, E); with C >= K one tile holds all
children of a node, otherwise ("wide" trees) they come in K / C pieces. Everything is computed in float32.

Rows of the flat node tensor are a heap: the children of row r start at row K * (r + 1), those of the root at row 0.
Counting the root as parent 0, parent p has its children at rows K * p. The leaves under the last level, `block` to a
parent, follow the same order. Offsets into tensors are 64 bit, since tensors may have more than 2^31 elements.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

STRIDES = ["q_batch", "q_row", "key_batch", "key_row", "value_batch", "value_row", "mask_batch"]


@triton.jit
def tile(base, rows, inside, HEAD_STRIDE: tl.constexpr, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr):
    """(M, C, H, E) float32: the rows that start `rows` (M, C) elements after `base`; 0 where not inside."""
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :]
    cells = base + rows[:, :, None, None] + (head * HEAD_STRIDE + lane)[None, None]
    exists = inside[:, :, None, None] & ((head < HEADS) & (lane < WIDTH))[None, None]
    return tl.load(cells, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def real_nodes(mask, rows, inside):
    """(M, C): which of `rows` are nodes of this tree that cover a real token."""
    if mask is not None:
        inside = inside & (tl.load(mask + rows, mask=inside, other=0) != 0)
    return inside


@triton.jit
def score(q, k, real):
    """(M, C, H) dot products, -inf at padding; q carries the factor 1 / sqrt(e)."""
    return tl.where(real[:, :, None], tl.sum(q * k, axis=3), float("-inf"))


@triton.jit
def child_scores(q, keys, mask, first, key_row, K, HEAD_STRIDE, HEADS, WIDTH, C: tl.constexpr, KP: tl.constexpr,
                 M: tl.constexpr, H: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """(M, KP, H) scores of the K children that start at rows `first`, also when not all keys fit into registers."""
    slot = tl.arange(0, C)[None, :]
    if KP == C:
        rows = first[:, None] + slot
        real = real_nodes(mask, rows, slot < K)
        scores = score(q, tile(keys, rows * key_row, slot < K, HEAD_STRIDE, HEADS, WIDTH, H, E), real)
    else:
        piece = tl.arange(0, KP // C)[None, :, None, None]
        pieces = tl.full((M, KP // C, C, H), float("-inf"), tl.float32)
        for i in range(KP // C):
            child = i * C + slot
            rows = first[:, None] + child
            found = real_nodes(mask, rows, child < K)
            part = score(q, tile(keys, rows * key_row, child < K, HEAD_STRIDE, HEADS, WIDTH, H, E), found)
            pieces = tl.where(piece == i, part[:, None], pieces)
        scores = tl.reshape(pieces, (M, KP, H))
    return scores


@triton.jit
def siblings(keys, values, mask, first, member, count, key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH,
           H: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """Keys, values and realness of siblings: the `member`s (1, C) of `count` nodes that start at rows `first` (M,).

    Padding nodes read as 0, since they may hold NaN. The loads do not wait for the mask.
    """
    rows = first[:, None] + member
    inside = member < count
    real = real_nodes(mask, rows, inside)
    k = tile(keys, rows * key_row, inside, KEY_HEAD, HEADS, WIDTH, H, E)
    v = tile(values, rows * value_row, inside, VALUE_HEAD, HEADS, WIDTH, H, E)
    return tl.where(real[:, :, None, None], k, 0.0), tl.where(real[:, :, None, None], v, 0.0), real


@triton.jit
def head_mean(weights, HEADS: tl.constexpr, H: tl.constexpr):
    """(M, C): the policy, as mean of attention weights (M, C, H) over the real heads."""
    if H != HEADS:
        weights = tl.where((tl.arange(0, H) < HEADS)[None, None, :], weights, 0.0)
    return tl.sum(weights, axis=2) * (1.0 / HEADS)


@triton.jit
def log_policy(policy, TINY: tl.constexpr = 1.1754943508222875e-38):
    """Logarithm, clamped at the smallest normal float32: a policy may underflow to 0, and 0 * log 0 must be 0."""
    return tl.log(tl.where(policy < TINY, TINY, policy))  # NaN stays NaN


@triton.jit
def choose(policy, scores, uniform, forced, K: tl.constexpr, KP: tl.constexpr):
    """(M,): the child to take. `forced` where that is a real child; else the first most likely one, or by inverse CDF.

    Never a child of probability 0, and always a child from 0 to K - 1, even for NaN.
    """
    child = tl.arange(0, KP)[None, :]
    if uniform is None:
        chosen = tl.minimum(tl.argmax(policy, axis=1), K - 1)
    else:
        below = tl.sum((uniform[:, None] >= tl.cumsum(policy, axis=1)).to(tl.int32), axis=1)
        chosen = tl.minimum(below, tl.max(tl.where(policy > 0, child, 0), axis=1))
    if forced is not None:
        real = tl.max(scores, axis=2) > float("-inf")
        found = tl.max(((child == forced[:, None]) & real).to(tl.int32), axis=1) > 0
        chosen = tl.where(found, forced.to(tl.int32), chosen)
    return chosen


@triton.jit
def absorb(scores, v, top, total, mixed):
    """Add values to an online softmax per child slot; the slots are merged once, after the descent."""
    new = tl.maximum(top, scores)
    fade, weight = tl.exp(top - new), tl.exp(scores - new)
    return new, total * fade + weight, mixed * fade[:, :, :, None] + weight[:, :, :, None] * v


@triton.jit
def rejected_child(
    scores, taken, values, row, HEAD_STRIDE: tl.constexpr, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr
):
    """Scores (M, 1, H) and value (M, 1, H, E) of the child not taken of two; 0 where it is padding."""
    other = tl.sum(tl.where(taken[:, :, None], 0.0, scores), axis=1)[:, None, :]
    return other, tile(values, row[:, None], tl.max(other, axis=2) > float("-inf"), HEAD_STRIDE, HEADS, WIDTH, H, E)


@triton.jit
def load_queries(
    q, keys, values, queries, m, q_batch, q_row, key_batch, value_batch, UNIT: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr, M: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The M queries of this program: flat index, which exist, batch row, scaled q, and base pointers of their nodes."""
    index = tl.program_id(0) * M + tl.arange(0, M)
    live = index < queries
    index = tl.minimum(index, queries - 1)  # spare lanes repeat the last query, so that loads need no mask
    batch = (index // m).to(tl.int64)
    at = (batch * q_batch + (index % m) * q_row.to(tl.int64)) * UNIT
    q_tile = tile(q, at[:, None], tl.full((M, 1), 1, tl.int1), Q_HEAD, HEADS, WIDTH, H, E) * (WIDTH**-0.5)
    keys += (batch * key_batch * UNIT)[:, None, None, None]
    values += (batch * value_batch * UNIT)[:, None, None, None]
    return index.to(tl.int64), live, batch, q_tile, keys, values


@triton.jit
def store_rows(into, index, rows, live, HEADS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr):
    """Write (M, H, E) `rows` to rows `index` (M,) of a dense tensor, where `live`."""
    head, lane = tl.arange(0, H)[None, :, None], tl.arange(0, E)[None, None, :]
    cells = into + index[:, None, None] * (HEADS * WIDTH) + head * WIDTH + lane
    exists = live[:, None, None] & (head < HEADS) & (lane < WIDTH)
    tl.store(cells, rows.to(into.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["queries", "m", "depth", "block", "leaf_offset", *STRIDES])
def descend(
    q, keys, values, mask, noise, choices, output, path, log_prob, entropy, lse,
    queries, m, depth, block, leaf_offset, q_batch, q_row, key_batch, key_row, value_batch, value_row, mask_batch,
    UNIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr,
    KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Walk M queries from the root to their leaf blocks.

    Each level waits for the one before, so latency counts: keys and values of all children are loaded at once, before
    the choice among them. With LATE (binary trees, and so many queries that memory bandwidth is the limit), only the
    value of the rejected child is loaded, after the choice.
    """
    index, live, batch, q_tile, key_base, value_base = load_queries(
        q, keys, values, queries, m, q_batch, q_row, key_batch, value_batch, UNIT, HEADS, WIDTH, Q_HEAD, M, H, E
    )
    if mask is not None:
        mask += (batch * mask_batch)[:, None]
    key_row, value_row = key_row.to(tl.int64) * UNIT, value_row.to(tl.int64) * UNIT
    slot = tl.arange(0, C)[None, :]
    first = tl.zeros((M,), tl.int64)  # row of the first child
    path_log_prob, path_entropy = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    # Running maxima start at the lowest finite number: -inf minus that is -inf, whereas -inf - -inf is NaN.
    SLOTS: tl.constexpr = 1 if LATE else C
    top, total = tl.full((M, SLOTS, H), -3.4028234663852886e38, tl.float32), tl.zeros((M, SLOTS, H), tl.float32)
    mixed = tl.zeros((M, SLOTS, H, E), tl.float32)
    for level in range(depth):
        if KP == C and not LATE:
            k, v, real = siblings(key_base, value_base, mask, first, slot, K, key_row, value_row,
                                KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
            scores = score(q_tile, k, real)
        else:
            scores = child_scores(q_tile, key_base, mask, first, key_row, K, KEY_HEAD, HEADS, WIDTH, C, KP, M, H, E)
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        policy = head_mean(weights / tl.sum(weights, axis=1)[:, None], HEADS, H)
        uniform = None
        if noise is not None:
            uniform = tl.load(noise + index * depth + level)
        forced = None
        if choices is not None:
            forced = tl.load(choices + index * depth + level)
        chosen = choose(policy, scores, uniform, forced, K, KP)
        taken = tl.arange(0, KP)[None, :] == chosen[:, None]
        if LATE:
            others, v = rejected_child(scores, taken, value_base, (first + 1 - chosen) * value_row,
                                VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
        log_pi = log_policy(policy)
        path_log_prob += tl.sum(tl.where(taken, log_pi, 0.0), axis=1)
        path_entropy -= tl.sum(policy * log_pi, axis=1)
        if LATE:
            top, total, mixed = absorb(others, v, top, total, mixed)
        elif KP == C:
            others = tl.where(taken[:, :, None], float("-inf"), scores)
            top, total, mixed = absorb(others, v, top, total, mixed)
        else:
            for start in range(0, K, C):
                child = start + slot
                k, v, found = siblings(key_base, value_base, mask, first, child, K, key_row, value_row,
                                     KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
                others = score(q_tile, k, found & (child != chosen[:, None]))
                top, total, mixed = absorb(others, v, top, total, mixed)
        first = (first + chosen + 1) * K
    leaf_block = (first - leaf_offset) // K
    if LATE:  # one slot for each leaf; the sums of the descent stay in the first
        top = tl.broadcast_to(top, (M, C, H))
        total = tl.where(slot[:, :, None] == 0, total, 0.0)
        mixed = tl.where(slot[:, :, None, None] == 0, mixed, 0.0)
    for start in range(0, block, C):
        k, leaf_v, real = siblings(key_base, value_base, mask, leaf_offset + leaf_block * block, start + slot, block,
                                 key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
        top, total, mixed = absorb(score(q_tile, k, real), leaf_v, top, total, mixed)
    highest = tl.max(top, axis=1)
    fade = tl.exp(top - highest[:, None])
    total = tl.sum(total * fade, axis=1)
    result = tl.sum(mixed * fade[:, :, :, None], axis=1) / total[:, :, None]
    store_rows(output, index, result, live, HEADS, WIDTH, H, E)
    tl.store(path + index, leaf_block, mask=live)
    tl.store(log_prob + index, path_log_prob, mask=live)
    tl.store(entropy + index, path_entropy, mask=live)
    if lse is not None:
        heads = tl.arange(0, H)[None, :]
        at = lse + index[:, None] * HEADS + heads
        tl.store(at, highest + tl.log(total), mask=live[:, None] & (heads < HEADS))
