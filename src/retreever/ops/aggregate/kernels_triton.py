"""Triton kernel of the paper's aggregator: a transformer layer among siblings, then their mean, level by level.

Inference only. In plain torch a level costs about twenty launches, and a tree of 256 tokens has seven levels, computed
one after the other. Here a level is at most one launch, and memory traffic is children, weights and parents alone.
A program holds the children of some parents as rows of one tile. In binary trees a row attends to itself and its one
sibling. With more children it computes attention for all rows at once, masked so that a row sees its own siblings only:
tiles are small, and on tensor cores the masked products cost little time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, weight, bias, D: tl.constexpr):
    """Layer norm of the rows of x."""
    mean = tl.sum(x, axis=1) / D
    centred = x - mean[:, None]
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + 1e-5)
    return centred * scale[:, None] * weight[None, :] + bias[None, :]


@triton.jit
def project(x, weight, rows, columns, row_stride, PRECISION: tl.constexpr):
    """x @ W.T for rows `columns` of a torch Linear weight W (out, in), whose inputs are `rows`."""
    w = tl.load(weight + columns[None, :] * row_stride + rows[:, None])
    return tl.dot(x.to(w.dtype), w, input_precision=PRECISION)


@triton.jit
def attend_siblings(
    normed, context, sees, q_w, kv_w, out_w, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention of all rows to the rows they see.

    A row sees its real siblings and itself: where all are padding, the mean over children drops the result.
    """
    E: tl.constexpr = D // HEADS
    row, column, head = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, E)
    sees = sees | (row[:, None] == row[None, :])
    attended = tl.zeros([ROWS, D], tl.float32)
    for h in tl.static_range(HEADS):
        q = project(normed, q_w, column, h * E + head, D, PRECISION) * SCALE
        k = project(context, kv_w, column, h * E + head, D, PRECISION)
        v = project(context, kv_w, column, D + h * E + head, D, PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(sees, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
        mixed = tl.dot(weights, v, input_precision=PRECISION)
        attended += project(mixed, out_w + h * E, head, column, D, PRECISION)
    return attended


@triton.jit
def attend_pairs(
    normed, context, lead, other_real, q_w, kv_w, out_w, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention of a row to itself and its one sibling, `context - lead`.

    The softmax of two scores is a sigmoid of their difference, which is the score of `lead`, as keys are linear.
    """
    E: tl.constexpr = D // HEADS
    column = tl.arange(0, D)
    margin = project(normed, q_w, column, column, D, PRECISION) * project(lead, kv_w, column, column, D, PRECISION)
    margin = tl.sum(tl.reshape(margin, (ROWS, HEADS, E)), axis=2) * SCALE
    away = tl.where(other_real[:, None], tl.sigmoid(-margin), 0.0)  # the weight of the sibling
    away = tl.reshape(tl.broadcast_to(away[:, :, None], (ROWS, HEADS, E)), (ROWS, D))
    mixed = project(context, kv_w, column, D + column, D, PRECISION)
    mixed -= away * project(lead, kv_w, column, D + column, D, PRECISION)
    return project(mixed, out_w, column, column, D, PRECISION)


@triton.jit
def summarise(
    nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, first, count, total_parents,
    norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute parents first .. first + count - 1, counted over the batch, from their children.

    In every row of the batch parents lie from row `first_parent` of `nodes` on, children from row `first_child` on.
    """
    row = tl.arange(0, ROWS)
    own_parent = first + row // CHILDREN
    inside = (row < count * CHILDREN) & (own_parent < total_parents)
    batch, parent = own_parent // parents, own_parent % parents
    child = first_child + parent * CHILDREN + row % CHILDREN
    sibling = batch * batch_stride + (first_child + parent * CHILDREN + CHILDREN - 1 - row % CHILDREN) * D
    real, other_real = inside, inside
    if mask is not None:
        at = mask + batch * mask_stride + first_child + parent * CHILDREN
        real = inside & (tl.load(at + row % CHILDREN, mask=inside, other=0) != 0)
        other_real = inside & (tl.load(at + CHILDREN - 1 - row % CHILDREN, mask=inside, other=0) != 0)
    column = tl.arange(0, D)
    where = nodes + (batch * batch_stride + child * D)[:, None] + column[None, :]
    x = tl.load(where, mask=inside[:, None], other=0.0).to(tl.float32)
    normed = normalise(x, tl.load(norm_w + column), tl.load(norm_b + column), D)
    context = normed if PRE else x
    if CHILDREN == 2:
        other = tl.load(nodes + sibling[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        if PRE:
            other = normalise(other, tl.load(norm_w + column), tl.load(norm_b + column), D)
        attended = attend_pairs(normed, context, context - other, other_real, q_w, kv_w, out_w, HEADS, D, SCALE,
                                PRECISION, ROWS)  # fmt: skip
    else:
        sees = (row[:, None] // CHILDREN == row[None, :] // CHILDREN) & real[None, :]
        attended = attend_siblings(normed, context, sees, q_w, kv_w, out_w, HEADS, D, SCALE, PRECISION, ROWS)
    out = (x if PRE else normed) + attended + tl.load(out_b + column)[None, :]
    fed = normalise(out, tl.load(feed_w + column), tl.load(feed_b + column), D)
    total = (out if PRE else fed) + tl.load(down_b + column)[None, :]
    for start in tl.static_range(0, HIDDEN, D):
        unit = start + column
        value = project(fed, up_w, column, unit, D, PRECISION) + tl.load(up_b + unit)[None, :]
        gate = project(fed, up_w, column, HIDDEN + unit, D, PRECISION) + tl.load(up_b + HIDDEN + unit)[None, :]
        gated = value * 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        total += project(gated, down_w + start, column, column, HIDDEN, PRECISION)
    if CHILDREN == 2:
        target = first + tl.arange(0, ROWS // 2)
        write = (tl.arange(0, ROWS // 2) < count) & (target < total_parents)
        mean = tl.sum(tl.reshape(tl.where(real[:, None], total, 0.0), (ROWS // 2, 2, D)), axis=1)
        mean = mean / tl.maximum(tl.sum(tl.reshape(real.to(tl.float32), (ROWS // 2, 2)), axis=1), 1.0)[:, None]
    else:
        # The mean over each parent's real children, as a product with a matrix of ones and zeros.
        member = ((row[:, None] == row[None, :] // CHILDREN) & real[None, :]).to(tl.float32)
        mean = tl.dot(member, total, input_precision=PRECISION) / tl.maximum(tl.sum(member, axis=1), 1.0)[:, None]
        target = first + row
        write = (row < count) & (target < total_parents)
    address = (target // parents) * batch_stride + (first_parent + target % parents) * D
    tl.store(nodes + address[:, None] + column[None, :], mean.to(nodes.dtype.element_ty), mask=write[:, None])


@triton.jit(do_not_specialize=["first_child", "first_parent", "parents", "total_parents", "count", "steps"])
def aggregate_up(
    nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, total_parents, count, steps,
    norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute `count` parents per program and their ancestors, `steps` levels in all; programs are independent."""
    first = tl.program_id(0).to(tl.int64) * count
    for _ in range(steps):
        summarise(
            nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, first, count, total_parents,
            norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
            CHILDREN, HEADS, D, HIDDEN, PRE, SCALE, PRECISION, ROWS,
        )  # fmt: skip
        tl.debug_barrier()  # the next level reads what other threads of this program wrote
        first = first // CHILDREN
        count = count // CHILDREN
        total_parents = total_parents // CHILDREN
        parents = parents // CHILDREN
        first_child, first_parent = first_parent, first_parent - parents
