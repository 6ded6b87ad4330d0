"""Triton kernels of the gradients of tree attention: of the queries along their paths, and of the nodes.

Letters and layout are those of `forward_triton`. There are no atomics: the queries are sorted by path, so those that
passed a node are adjacent, and one program sums them in a fixed order. Gradients are the same bits in every run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from retreever.ops.search.forward_triton import (
    STRIDES,
    child_scores,
    head_mean,
    load_queries,
    log_policy,
    score,
    siblings,
    store_rows,
    tile,
)


@triton.jit
def policy_gradient(weights, taken, d_log_prob, d_entropy, HEADS: tl.constexpr, H: tl.constexpr,
                 TINY: tl.constexpr = 1.1754943508222875e-38):  # fmt: skip
    """(M, C): gradient of the loss with respect to the policy, through the path's log-probability and entropy."""
    policy = head_mean(weights, HEADS, H)
    normal = policy >= TINY  # below TINY the clamped logarithm has gradient 0
    by_log_prob = tl.where(taken & normal, d_log_prob[:, None] / tl.maximum(policy, TINY), 0.0)
    return by_log_prob - d_entropy[:, None] * (log_policy(policy) + normal.to(tl.float32))


@triton.jit
def score_gradient(scores, by_value, lse, delta, taken, level_lse, mean_gradient, d_log_prob, d_entropy,
                HEADS: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """(M, C, H): attention weights of the children (0 for the one taken), and gradients of the loss in their scores."""
    joined = tl.where(taken[:, :, None], 0.0, tl.exp(scores - lse[:, None]))
    weights = tl.exp(scores - level_lse[:, None])
    d_policy = policy_gradient(weights, taken, d_log_prob, d_entropy, HEADS, H)
    by_policy = weights * (d_policy[:, :, None] - mean_gradient[:, None]) * (1.0 / HEADS)
    return joined, joined * (by_value - delta[:, None]) + by_policy


@triton.jit(do_not_specialize=["queries", "m", "depth", "block", "leaf_offset", *STRIDES])
def query_gradient(
    q, keys, values, mask, path, output, lse, d_output, d_log_prob, d_entropy, d_q, delta, stats,
    queries, m, depth, block, leaf_offset, q_batch, q_row, key_batch, key_row, value_batch, value_row, mask_batch,
    UNIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, Q_HEAD: tl.constexpr,
    KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries along their known paths, leaves first.

    Also writes, for `node_gradient`: delta of every query (output times output gradient, summed per head) and, per
    level, the softmax normaliser and the mean gradient.
    """
    index, live, batch, q_tile, key_base, value_base = load_queries(
        q, keys, values, queries, m, q_batch, q_row, key_batch, value_batch, UNIT, HEADS, WIDTH, Q_HEAD, M, H, E
    )
    if mask is not None:
        mask += (batch * mask_batch)[:, None]
    key_row, value_row = key_row.to(tl.int64) * UNIT, value_row.to(tl.int64) * UNIT
    slot = tl.arange(0, C)[None, :]
    at, everywhere = (index * (HEADS * WIDTH))[:, None], tl.full((M, 1), 1, tl.int1)
    d_out = tile(d_output, at, everywhere, WIDTH, HEADS, WIDTH, H, E)
    out = tile(output, at, everywhere, WIDTH, HEADS, WIDTH, H, E)
    heads = tl.arange(0, H)[None, :]
    head_live = live[:, None] & (heads < HEADS)
    head_lse = tl.load(lse + index[:, None] * HEADS + heads, mask=heads < HEADS, other=0.0)
    head_delta = tl.sum(tl.sum(out * d_out, axis=3), axis=1)  # the middle axis has length 1
    tl.store(delta + index[:, None] * HEADS + heads, head_delta, mask=head_live)
    log_prob_gradient, entropy_gradient = tl.load(d_log_prob + index), tl.load(d_entropy + index)
    leaf_block = tl.load(path + index)
    gradient = tl.zeros((M, C, H, E), tl.float32)  # one per child slot, summed at the end
    for start in range(0, block, C):
        k, v, real = siblings(key_base, value_base, mask, leaf_offset + leaf_block * block, start + slot, block,
                            key_row, value_row, KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
        weight = tl.exp(score(q_tile, k, real) - head_lse[:, None])
        d_score = weight * (tl.sum(d_out * v, axis=3) - head_delta[:, None])
        gradient += d_score[:, :, :, None] * k
    parent = leaf_block + (leaf_offset // K)  # of the leaves, counting the root as 0
    for step in range(depth):
        child_taken = (parent - 1) % K
        parent = (parent - 1) // K
        first = parent * K
        scores = child_scores(q_tile, key_base, mask, first, key_row, K, KEY_HEAD, HEADS, WIDTH, C, KP, M, H, E)
        highest = tl.max(scores, axis=1)
        level_lse = highest + tl.log(tl.sum(tl.exp(scores - highest[:, None]), axis=1))
        weights = tl.exp(scores - level_lse[:, None])
        taken = tl.arange(0, KP)[None, :] == child_taken[:, None]
        all_gradients = policy_gradient(weights, taken, log_prob_gradient, entropy_gradient, HEADS, H)
        mean_gradient = tl.sum(weights * all_gradients[:, :, None], axis=1)
        for start in range(0, K, C):
            child = start + slot
            k, v, real = siblings(key_base, value_base, mask, first, child, K, key_row, value_row,
                                KEY_HEAD, VALUE_HEAD, HEADS, WIDTH, H, E)  # fmt: skip
            _joined, d_score = score_gradient(
                score(q_tile, k, real), tl.sum(d_out * v, axis=3), head_lse, head_delta,
                child == child_taken[:, None], level_lse, mean_gradient, log_prob_gradient, entropy_gradient, HEADS, H,
            )  # fmt: skip
            gradient += d_score[:, :, :, None] * k
        stat = stats + ((index * depth + (depth - 1 - step)) * (2 * HEADS))[:, None] + heads
        tl.store(stat, level_lse, mask=head_live)
        tl.store(stat + HEADS, mean_gradient, mask=head_live)
    store_rows(d_q, index, tl.sum(gradient, axis=1) * (WIDTH**-0.5), live, HEADS, WIDTH, H, E)


@triton.jit
def span_of(parent, inner, depth, K: tl.constexpr):
    """First leaf block under `parent`, the number of leaf blocks, and the level of `parent` (the root has level 0)."""
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
        away = tl.load(paths + rank, mask=live, other=0) - first_path  # index among the leaf blocks under the parent
        place = tl.load(order + rank, mask=live, other=0)
        index = batch * m + place
        q_tile = tile(q, (place * q_row)[:, None], lives, Q_HEAD, HEADS, WIDTH, H, E) * (WIDTH**-0.5)
        d_out = tile(d_output, (index * (HEADS * WIDTH))[:, None], lives, WIDTH, HEADS, WIDTH, H, E)
        head_lse = tl.load(lse + index[:, None] * HEADS + heads, mask=head_live, other=0.0)
        head_delta = tl.load(delta + index[:, None] * HEADS + heads, mask=head_live, other=0.0)
        decides = rank < tl.where(level < depth, end, start)  # none at leaves: the policy does not choose among them
        stat = stats + ((index * depth + level) * (2 * HEADS))[:, None] + heads
        # Where there is no decision the normaliser is +inf: the weights of the policy and their gradients become 0.
        level_lse = tl.load(stat, mask=decides[:, None] & (heads < HEADS), other=float("inf"))
        mean_gradient = tl.load(stat + HEADS, mask=decides[:, None] & (heads < HEADS), other=0.0)
        log_prob_gradient = tl.load(d_log_prob + index, mask=decides, other=0.0)
        entropy_gradient = tl.load(d_entropy + index, mask=decides, other=0.0)
        taken = (away[:, None] >= child * child_span) & (away[:, None] < (child + 1) * child_span)
        weight, d_score = score_gradient(
            score(q_tile, k, real), tl.sum(d_out * v, axis=3), head_lse, head_delta, taken, level_lse, mean_gradient,
            log_prob_gradient, entropy_gradient, HEADS, H,
        )  # fmt: skip
        d_k += tl.sum(d_score[:, :, :, None] * q_tile, axis=0)
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
    inner = leaf_offset // K  # parents whose children are not leaves; their programs have most work and come first
    if PARTS:
        pieces, ahead = tl.cdiv(widest, C), 0
    else:
        ahead = inner * tl.cdiv(K, C) * b
        pieces = tl.where(program < ahead, tl.cdiv(K, C), tl.cdiv(block, C))
        ahead = tl.where(program < ahead, 0, ahead)
    place = (program - ahead) // pieces
    child = (program - ahead) % pieces * C + tl.arange(0, C)[None, :]
    batch = (place % b).to(tl.int64)
    place = place // b  # of the parent, or of the level and cut with PARTS
    paths, order = paths + batch * m, order + batch * m
    if PARTS:
        cut = place % cuts + 1
        parent = tl.load(paths + cut * LENGTH).to(tl.int32) + inner
        for _ in range(depth - place // cuts):
            parent = (parent - 1) // K
    else:
        parent = place + tl.where(ahead > 0, inner, 0)
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
    mask = mask
    if mask is not None:
        mask = mask + batch * mask_batch
    k, v, real = siblings(keys + batch * key_batch * UNIT, values + batch * value_batch * UNIT, mask,
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
