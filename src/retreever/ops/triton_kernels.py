"""Triton kernels of tree attention: one pass down the tree and its two gradients. No atomics, no set in memory.

Letters in capitals are compile-time constants: K branch, HEADS and WIDTH (h and e), H and E (the same, padded to powers
of two), M queries per tile, C children per tile. A tile of node rows is (M, C, H, E); with C >= K one tile holds all
children of a node, otherwise ("wide" trees) they come in K / C pieces. Everything is computed in float32.

Rows of the flat node tensor are a heap: the children of row r start at row K * (r + 1), those of the root at row 0.
Counting the root as parent 0, parent p has its children at rows K * p. The leaves under the last level, `block` to a
parent, follow the same order. Offsets into tensors are 64 bit, since tensors may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32: policies are clamped there before a logarithm
STRIDES = ["q_batch", "q_row", "key_batch", "key_row", "value_batch", "value_row", "mask_batch"]
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a finite start of running maxima: exp(-inf - LOWEST) is 0, never NaN


@triton.jit
def tile(base, rows, inside, HEAD_STRIDE: tl.constexpr, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr):
    """(M, C, H, E) float32: the rows that start `rows` (M, C) elements after `base`; 0 where not inside."""
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :]
    cells = base + rows[:, :, None, None] + (head * HEAD_STRIDE + lane)[None, None]
    exists = inside[:, :, None, None] & ((head < HEADS) & (lane < WIDTH))[None, None]
    return tl.load(cells, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def node_tile(nodes, rows, row_stride, inside, real, HEAD_STRIDE, HEADS, WIDTH, H: tl.constexpr, E: tl.constexpr):
    """Keys or values of `rows`. Padding nodes read as 0, so whatever stands there cannot turn 0 * x into NaN.

    The load itself does not wait for `real`: the node mask is fetched at the same time as the nodes.
    """
    found = tile(nodes, rows * row_stride, inside, HEAD_STRIDE, HEADS, WIDTH, H, E)
    return tl.where(real[:, :, None, None], found, 0.0)


@triton.jit
def real_nodes(mask, rows, inside):
    """(M, C): which of `rows` are nodes of this tree that stand for a real token."""
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
    """(M, KP, H): scores of all children at rows first .. first + K, in registers even when the keys would not fit."""
    slot = tl.arange(0, C)[None, :]
    if KP == C:
        rows = first[:, None] + slot
        real = real_nodes(mask, rows, slot < K)
        scores = score(q, node_tile(keys, rows, key_row, slot < K, real, HEAD_STRIDE, HEADS, WIDTH, H, E), real)
    else:
        piece = tl.arange(0, KP // C)[None, :, None, None]
        pieces = tl.full((M, KP // C, C, H), float("-inf"), tl.float32)
        for i in range(KP // C):
            child = i * C + slot
            rows = first[:, None] + child
            real = real_nodes(mask, rows, child < K)
            part = score(q, node_tile(keys, rows, key_row, child < K, real, HEAD_STRIDE, HEADS, WIDTH, H, E), real)
            pieces = tl.where(piece == i, part[:, None], pieces)
        scores = tl.reshape(pieces, (M, KP, H))
    return scores


@triton.jit
def family(keys, values, mask, first, member, count, key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH,
           H: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """Keys, values and realness of nodes: the `member`s (1, C) of families of `count` that start at rows `first` (M,)."""
    rows = first[:, None] + member
    inside = member < count
    real = real_nodes(mask, rows, inside)
    k = node_tile(keys, rows, key_row, inside, real, KEY_HEAD, HEADS, WIDTH, H, E)
    v = node_tile(values, rows, value_row, inside, real, VALUE_HEAD, HEADS, WIDTH, H, E)
    return k, v, real


@triton.jit
def head_mean(weights, HEADS: tl.constexpr, H: tl.constexpr):
    """(M, C): the policy, as mean of attention weights (M, C, H) over the real heads."""
    if H != HEADS:
        weights = tl.where((tl.arange(0, H) < HEADS)[None, None, :], weights, 0.0)
    return tl.sum(weights, axis=2) * (1.0 / HEADS)


@triton.jit
def log_policy(policy):
    return tl.log(tl.maximum(policy, TINY))


@triton.jit
def choose(policy, uniform, K: tl.constexpr, KP: tl.constexpr):
    """(M,): first most likely child, or by inverse CDF; never one of probability 0, never outside even for NaN."""
    if uniform is None:
        chosen = tl.minimum(tl.argmax(policy, axis=1), K - 1)
    else:
        child = tl.arange(0, KP)[None, :]
        below = tl.sum((uniform[:, None] >= tl.cumsum(policy, axis=1)).to(tl.int32), axis=1)
        chosen = tl.minimum(below, tl.max(tl.where(policy > 0, child, 0), axis=1))
    return chosen


@triton.jit
def absorb(scores, v, top, total, mixed):
    """Online softmax, one per child slot: no reduction inside the descent, the slots are merged once at its end."""
    new = tl.maximum(top, scores)
    fade, weight = tl.exp(top - new), tl.exp(scores - new)
    return new, total * fade + weight, mixed * fade[:, :, :, None] + weight[:, :, :, None] * v


@triton.jit
def query_tile(queries, m, M: tl.constexpr):
    """Flat query indices of this program, which exist, and their batch rows. Spare lanes redo the last query."""
    index = tl.program_id(0) * M + tl.arange(0, M)
    live = index < queries
    index = tl.minimum(index, queries - 1)
    batch = index // m
    return index.to(tl.int64), live, batch.to(tl.int64), (index - batch * m).to(tl.int64)


@triton.jit(do_not_specialize=["queries", "m", "depth", "block", "leaf_offset", *STRIDES])
def descend(
    q, keys, values, mask, noise, output, path, log_prob, entropy, lse,
    queries, m, depth, block, leaf_offset, q_batch, q_row, key_batch, key_row, value_batch, value_row, mask_batch,
    UNIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr,
    KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Walk M queries from the root to their leaf blocks. Each level waits for the one before, so all it needs is
    loaded at once, and the attention of a level is computed while the rows of the next one are on their way."""
    index, live, batch, place = query_tile(queries, m, M)
    key_row, value_row = key_row.to(tl.int64) * UNIT, value_row.to(tl.int64) * UNIT
    slot = tl.arange(0, C)[None, :]
    everywhere = tl.full((M, 1), 1, tl.int1)
    q_at = ((batch * q_batch + place * q_row) * UNIT)[:, None]
    q_tile = tile(q, q_at, everywhere, Q_HEAD, HEADS, WIDTH, H, E) * (WIDTH**-0.5)
    key_base = keys + (batch * key_batch * UNIT)[:, None, None, None]
    value_base = values + (batch * value_batch * UNIT)[:, None, None, None]
    mask_base = mask
    if mask is not None:
        mask_base = mask + (batch * mask_batch)[:, None]
    first = tl.zeros((M,), tl.int64)  # row of the first child
    path_log_prob, path_entropy = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    top, total = tl.full((M, C, H), LOWEST, tl.float32), tl.zeros((M, C, H), tl.float32)
    mixed = tl.zeros((M, C, H, E), tl.float32)
    waiting, v = tl.full((M, C, H), float("-inf"), tl.float32), tl.zeros((M, C, H, E), tl.float32)
    for level in range(depth):
        if KP == C:
            rows = first[:, None] + slot
            real = real_nodes(mask_base, rows, slot < K)
            next_v = node_tile(value_base, rows, value_row, slot < K, real, VALUE_HEAD, HEADS, WIDTH, H, E)
        scores = child_scores(q_tile, key_base, mask_base, first, key_row, K, KEY_HEAD, HEADS, WIDTH, C, KP, M, H, E)
        if KP == C:
            top, total, mixed = absorb(waiting, v, top, total, mixed)
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        policy = head_mean(weights / tl.sum(weights, axis=1)[:, None], HEADS, H)
        uniform = None
        if noise is not None:
            uniform = tl.load(noise + index * depth + level)
        chosen = choose(policy, uniform, K, KP)
        taken = tl.arange(0, KP)[None, :] == chosen[:, None]
        log_pi = log_policy(policy)
        path_log_prob += tl.sum(tl.where(taken, log_pi, 0.0), axis=1)
        path_entropy -= tl.sum(policy * log_pi, axis=1)
        if KP == C:
            waiting, v = tl.where(taken[:, :, None], float("-inf"), scores), next_v
        else:
            for start in range(0, K, C):
                child = start + slot
                k, child_v, real = family(key_base, value_base, mask_base, first, child, K, key_row, value_row,
                                          KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
                siblings = score(q_tile, k, real & (child != chosen[:, None]))
                top, total, mixed = absorb(siblings, child_v, top, total, mixed)
        first = (first + chosen + 1) * K
    if KP == C:
        top, total, mixed = absorb(waiting, v, top, total, mixed)
    leaf_block = (first - leaf_offset) // K
    for start in range(0, block, C):
        k, leaf_v, real = family(key_base, value_base, mask_base, leaf_offset + leaf_block * block, start + slot, block,
                                 key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
        top, total, mixed = absorb(score(q_tile, k, real), leaf_v, top, total, mixed)
    highest = tl.max(top, axis=1)
    fade = tl.exp(top - highest[:, None])
    total = tl.sum(total * fade, axis=1)
    result = tl.sum(mixed * fade[:, :, :, None], axis=1) / total[:, :, None]
    head, lane = tl.arange(0, H)[None, :, None], tl.arange(0, E)[None, None, :]
    cells = index[:, None, None] * (HEADS * WIDTH) + head * WIDTH + lane
    exists = live[:, None, None] & (head < HEADS) & (lane < WIDTH)
    tl.store(output + cells, result.to(output.dtype.element_ty), mask=exists)
    tl.store(path + index, leaf_block, mask=live)
    tl.store(log_prob + index, path_log_prob, mask=live)
    tl.store(entropy + index, path_entropy, mask=live)
    if lse is not None:
        heads = tl.arange(0, H)[None, :]
        at = lse + index[:, None] * HEADS + heads
        tl.store(at, highest + tl.log(total), mask=live[:, None] & (heads < HEADS))


@triton.jit
def policy_slope(weights, taken, d_log_prob, d_entropy, HEADS: tl.constexpr, H: tl.constexpr):
    """(M, C): derivative of the loss by the policy, from the log-probability of the path and from its entropy."""
    policy = head_mean(weights, HEADS, H)
    normal = policy >= TINY  # below, the clamp of the logarithm cuts the gradient
    by_log_prob = tl.where(taken & normal, d_log_prob[:, None] / tl.maximum(policy, TINY), 0.0)
    return by_log_prob - d_entropy[:, None] * (log_policy(policy) + normal.to(tl.float32))


@triton.jit
def score_slope(scores, by_value, lse, delta, taken, level_lse, mean_slope, d_log_prob, d_entropy,
                HEADS: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """(M, C, H) attention weights of the children that joined, and the derivative of the loss by their scores."""
    joined = tl.where(taken[:, :, None], 0.0, tl.exp(scores - lse[:, None]))
    weights = tl.exp(scores - level_lse[:, None])
    slope = policy_slope(weights, taken, d_log_prob, d_entropy, HEADS, H)
    by_policy = weights * (slope[:, :, None] - mean_slope[:, None]) * (1.0 / HEADS)
    return joined, joined * (by_value - delta[:, None]) + by_policy


@triton.jit(do_not_specialize=["queries", "m", "depth", "block", "leaf_offset", *STRIDES])
def query_gradient(
    q, keys, values, mask, path, output, lse, d_output, d_log_prob, d_entropy, d_q, delta, stats,
    queries, m, depth, block, leaf_offset, q_batch, q_row, key_batch, key_row, value_batch, value_row, mask_batch,
    UNIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr,
    KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries along their known paths, leaves first. Leaves behind what `node_gradient` needs of every
    query: delta (its output times the gradient of it, per head) and per level the softmax normaliser and mean slope."""
    index, live, batch, place = query_tile(queries, m, M)
    key_row, value_row = key_row.to(tl.int64) * UNIT, value_row.to(tl.int64) * UNIT
    slot = tl.arange(0, C)[None, :]
    everywhere = tl.full((M, 1), 1, tl.int1)
    q_at, at = ((batch * q_batch + place * q_row) * UNIT)[:, None], (index * (HEADS * WIDTH))[:, None]
    q_tile = tile(q, q_at, everywhere, Q_HEAD, HEADS, WIDTH, H, E) * (WIDTH**-0.5)
    d_out = tile(d_output, at, everywhere, WIDTH, HEADS, WIDTH, H, E)
    out = tile(output, at, everywhere, WIDTH, HEADS, WIDTH, H, E)
    key_base = keys + (batch * key_batch * UNIT)[:, None, None, None]
    value_base = values + (batch * value_batch * UNIT)[:, None, None, None]
    mask_base = mask
    if mask is not None:
        mask_base = mask + (batch * mask_batch)[:, None]
    heads = tl.arange(0, H)[None, :]
    head_live = live[:, None] & (heads < HEADS)
    head_lse = tl.load(lse + index[:, None] * HEADS + heads, mask=heads < HEADS, other=0.0)
    head_delta = tl.sum(tl.sum(out * d_out, axis=3), axis=1)  # the middle axis has length 1
    tl.store(delta + index[:, None] * HEADS + heads, head_delta, mask=head_live)
    log_prob_slope, entropy_slope = tl.load(d_log_prob + index), tl.load(d_entropy + index)
    leaf_block = tl.load(path + index)
    gradient = tl.zeros((M, C, H, E), tl.float32)  # one per child slot, summed at the end
    for start in range(0, block, C):
        k, v, real = family(key_base, value_base, mask_base, leaf_offset + leaf_block * block, start + slot, block,
                            key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
        weight = tl.exp(score(q_tile, k, real) - head_lse[:, None])
        slope = weight * (tl.sum(d_out * v, axis=3) - head_delta[:, None])
        gradient += slope[:, :, :, None] * k
    parent = leaf_block + (leaf_offset // K)  # of the leaves, counting the root as 0
    for step in range(depth):
        child_taken = (parent - 1) % K
        parent = (parent - 1) // K
        first = parent * K
        scores = child_scores(q_tile, key_base, mask_base, first, key_row, K, KEY_HEAD, HEADS, WIDTH, C, KP, M, H, E)
        highest = tl.max(scores, axis=1)
        level_lse = highest + tl.log(tl.sum(tl.exp(scores - highest[:, None]), axis=1))
        weights = tl.exp(scores - level_lse[:, None])
        taken = tl.arange(0, KP)[None, :] == child_taken[:, None]
        all_slopes = policy_slope(weights, taken, log_prob_slope, entropy_slope, HEADS, H)
        mean_slope = tl.sum(weights * all_slopes[:, :, None], axis=1)
        for start in range(0, K, C):
            child = start + slot
            k, v, real = family(key_base, value_base, mask_base, first, child, K, key_row, value_row,
                                KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
            _, slope = score_slope(
                score(q_tile, k, real), tl.sum(d_out * v, axis=3), head_lse, head_delta,
                child == child_taken[:, None], level_lse, mean_slope, log_prob_slope, entropy_slope, HEADS, H,
            )  # fmt: skip
            gradient += slope[:, :, :, None] * k
        stat = stats + ((index * depth + (depth - 1 - step)) * (2 * HEADS))[:, None] + heads
        tl.store(stat, level_lse, mask=head_live)
        tl.store(stat + HEADS, mean_slope, mask=head_live)
    head, lane = tl.arange(0, H)[None, :, None], tl.arange(0, E)[None, None, :]
    exists = live[:, None, None] & (head < HEADS) & (lane < WIDTH)
    result = tl.sum(gradient, axis=1) * (WIDTH**-0.5)
    cells = d_q + index[:, None, None] * (HEADS * WIDTH) + head * WIDTH + lane
    tl.store(cells, result.to(d_q.dtype.element_ty), mask=exists)


@triton.jit
def span_of(parent, inner, depth, K: tl.constexpr):
    """First leaf block under `parent`, how many there are, and the level of the parent (the root has level 0)."""
    low, high, level = parent, parent, depth
    for _ in range(depth):
        above = low < inner
        level = tl.where(above, level - 1, level)
        low, high = tl.where(above, low * K + 1, low), tl.where(above, high * K + K, high)
    return low - inner, high - low + 1, level


@triton.jit
def walk(
    q, lse, d_output, d_log_prob, d_entropy, delta, stats, paths, order, k, v, real, child, batch, begin, end, m, depth,
    first_path, child_span, level, q_row, HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """(C, H, E) gradients of keys and values from the sorted queries begin .. end - 1, in that order, M at a time."""
    heads = tl.arange(0, H)[None, :]
    d_k, d_v = tl.zeros((C, H, E), tl.float32), tl.zeros((C, H, E), tl.float32)
    for start in range(begin, end, M):
        rank = start + tl.arange(0, M)
        live = rank < end
        lives = live[:, None]
        head_live = lives & (heads < HEADS)
        away = tl.load(paths + rank, mask=live, other=0) - first_path  # which leaf block of those under the parent
        place = tl.load(order + rank, mask=live, other=0)
        index = batch * m + place
        q_tile = tile(q, (place * q_row)[:, None], lives, Q_HEAD, HEADS, WIDTH, H, E) * (WIDTH**-0.5)
        d_out = tile(d_output, (index * (HEADS * WIDTH))[:, None], lives, WIDTH, HEADS, WIDTH, H, E)
        head_lse = tl.load(lse + index[:, None] * HEADS + heads, mask=head_live, other=0.0)
        head_delta = tl.load(delta + index[:, None] * HEADS + heads, mask=head_live, other=0.0)
        decides = rank < tl.where(level < depth, end, start)  # none: leaves are not chosen among
        stat = stats + ((index * depth + level) * (2 * HEADS))[:, None] + heads
        # Where there is no decision the normaliser is +inf: the weights of the policy and their gradients become 0.
        level_lse = tl.load(stat, mask=decides[:, None] & (heads < HEADS), other=float("inf"))
        mean_slope = tl.load(stat + HEADS, mask=decides[:, None] & (heads < HEADS), other=0.0)
        log_prob_slope = tl.load(d_log_prob + index, mask=decides, other=0.0)
        entropy_slope = tl.load(d_entropy + index, mask=decides, other=0.0)
        taken = (away[:, None] >= child * child_span) & (away[:, None] < (child + 1) * child_span)
        weight, slope = score_slope(
            score(q_tile, k, real), tl.sum(d_out * v, axis=3), head_lse, head_delta, taken, level_lse, mean_slope,
            log_prob_slope, entropy_slope, HEADS, H,
        )  # fmt: skip
        d_k += tl.sum(slope[:, :, :, None] * q_tile, axis=0)
        d_v += tl.sum(weight[:, :, :, None] * d_out, axis=0)
    return d_k, d_v


@triton.jit(do_not_specialize=["b", "m", "depth", "block", "leaf_offset", "widest", "cuts", *STRIDES])
def node_gradient(
    q, keys, values, mask, lse, d_output, d_log_prob, d_entropy, delta, stats, paths, order, starts, partial, d_keys,
    d_values, b, m, depth, block, leaf_offset, widest, cuts, q_batch, q_row, key_batch, key_row, value_batch, value_row,
    mask_batch, PARTS: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    Q_HEAD: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    LENGTH: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradient of C children of one parent, from the queries that passed it: a segment of the queries sorted by path.

    Segments are cut at multiples of LENGTH. With PARTS, a program sums the queries after one cut, if a segment crosses
    it, into `partial` (depth + 1, cuts, b, 2, widest, h, e). Without, it sums those before the first cut, adds
    the partial sums in order, and writes the result. So no sum is long, and all are taken in a fixed order.
    """
    program = tl.program_id(0)
    inner = leaf_offset // K  # parents whose children are no leaves; their programs come first, they have most to do
    if PARTS:
        pieces, ahead = tl.cdiv(widest, C), 0
    else:
        ahead = inner * tl.cdiv(K, C) * b
        pieces = tl.where(program < ahead, tl.cdiv(K, C), tl.cdiv(block, C))
        ahead = tl.where(program < ahead, 0, ahead)
    group = (program - ahead) // pieces
    child = (program - ahead) % pieces * C + tl.arange(0, C)[None, :]
    batch = (group % b).to(tl.int64)
    group = group // b
    paths, order = paths + batch * m, order + batch * m
    if PARTS:
        cut = group % cuts + 1
        parent = tl.load(paths + cut * LENGTH).to(tl.int32) + inner
        for _ in range(depth - group // cuts):
            parent = (parent - 1) // K
    else:
        parent = group + tl.where(ahead > 0, inner, 0)
    first_path, span, level = span_of(parent, inner, depth, K)
    starts += batch * (inner * (K - 1) + 2) + first_path  # there are inner * (K - 1) + 1 leaf blocks
    begin, end = tl.load(starts), tl.load(starts + span)
    leaves = level == depth
    first = tl.where(leaves, leaf_offset + (parent - inner) * block, parent * K)
    count = tl.where(leaves, block, K)
    if PARTS:  # nothing to read or to write if no segment crosses the cut
        count = tl.where(begin < cut * LENGTH, count, 0)
        stop = tl.where(begin < cut * LENGTH, tl.minimum(end, (cut + 1) * LENGTH), 0)
        begin = cut * LENGTH
    else:
        cut = begin // LENGTH + 1
        stop = tl.minimum(end, cut * LENGTH)
    mask_base = mask
    if mask is not None:
        mask_base = mask + batch * mask_batch
    k, v, real = family(keys + batch * key_batch * UNIT, values + batch * value_batch * UNIT, mask_base,
                        first + tl.zeros((1,), tl.int64), child, count, key_row.to(tl.int64) * UNIT,
                        value_row.to(tl.int64) * UNIT, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
    d_k, d_v = walk(
        q + batch * q_batch * UNIT, lse, d_output, d_log_prob, d_entropy, delta, stats, paths, order, k, v, real, child,
        batch, begin, stop, m, depth, first_path, tl.where(leaves, 0, span // K), level, q_row.to(tl.int64) * UNIT,
        HEADS, WIDTH, Q_HEAD, M, C, H, E,
    )  # fmt: skip
    head, lane = tl.arange(0, H)[None, :, None], tl.arange(0, E)[None, None, :]
    child = tl.reshape(child, (C, 1, 1))
    exists = (child < count) & (head < HEADS) & (lane < WIDTH)
    cells = child * (HEADS * WIDTH) + head * WIDTH + lane
    size = widest * (HEADS * WIDTH)
    if PARTS:
        into = partial + ((level * cuts + cut - 1) * b + batch) * 2 * size + cells
        tl.store(into, d_k, mask=exists)
        tl.store(into + size, d_v, mask=exists)
    else:
        for following in range(cut, tl.cdiv(end, LENGTH)):
            at = partial + ((level * cuts + following - 1) * b + batch) * 2 * size + cells
            d_k += tl.load(at, mask=exists, other=0.0)
            d_v += tl.load(at + size, mask=exists, other=0.0)
        nodes = leaf_offset + (inner * (K - 1) + 1) * block
        at = (batch * nodes + first) * (HEADS * WIDTH) + cells
        tl.store(d_keys + at, d_k.to(d_keys.dtype.element_ty), mask=exists)
        tl.store(d_values + at, d_v.to(d_values.dtype.element_ty), mask=exists)
