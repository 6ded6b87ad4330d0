"""Triton kernel of one way up a binary tree, for layers whose weights fit into the registers of one program.

The matrices are read once for all levels, the node just computed stays in registers, and its sibling on the next level
is read ahead, so that a level waits for arithmetic alone. A level has two children: its products are sums in float32,
without tensor cores, whose tiles would be 16 rows high. Biases and norms are read where they are used: every warp has
all of a vector, and kept for all levels these would push matrices out of the registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retreever.ops.aggregate.steps import steps_of
from retreever.ops.aggregate.way_triton import is_real, put_token
from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.launching_triton import Launcher, on_device_of
from retreever.tree.plan import TreePlan

# To be measured: `retreever bench grow --device cuda --n 1048576` with and without. The kernel stays if its append is
# the faster one; otherwise this file goes, and `climb_path` does all ways.
ENABLED = True
WARPS = 8  # with all 65,536 registers of a processor; with 16 warps too few are left for the arithmetic
MOST_WEIGHTS = 42 * 1024  # numbers: a layer of width 64 with 128 hidden units has 41,728


@triton.jit
def matrix(weight, OUT: tl.constexpr, IN: tl.constexpr):
    """A dense matrix (OUT, IN)."""
    at = tl.arange(0, OUT)[:, None] * IN + tl.arange(0, IN)[None, :]
    return tl.load(weight + at).to(tl.float32)


@triton.jit
def vector(weight, SIZE: tl.constexpr):
    """SIZE numbers that lie side by side."""
    return tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)


@triton.jit
def times(w, x):
    """The product of a matrix and a vector."""
    return tl.sum(w * x[None, :], axis=1)


@triton.jit
def spread(x):
    """The same vector, but held by every warp: sums over it are then exchanged within warps alone.

    The sum of one row does nothing else; without it the compiler leaves a product where its rows were.
    """
    return tl.sum(x[None, :], axis=0)


@triton.jit
def normalise(x, weight, bias, D: tl.constexpr):
    """Layer norm of a vector."""
    centred = x - tl.sum(x, axis=0) / D
    return centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / D + 1e-5) * weight + bias


@triton.jit
def sibling_weights(own_q, other_q, lead, own_real, other_real, HEADS: tl.constexpr, E: tl.constexpr,
                    SCALE: tl.constexpr):  # fmt: skip
    """Weights of the sibling in both children's attention, one for every number of a head.

    `lead` is a child's key less its sibling's: the softmax of two scores is a sigmoid of their difference.
    """
    margins = tl.reshape(tl.join(own_q * lead, -other_q * lead), (HEADS, E, 2))
    weights = tl.sigmoid(-tl.sum(margins, axis=1) * SCALE)
    weights = tl.broadcast_to(weights[:, None, :], (HEADS, E, 2))
    own, other = tl.split(tl.reshape(weights, (HEADS * E, 2)))
    return own * other_real, other * own_real


@triton.jit
def gated(fed, value_w, value_b, gate_w, gate_b):
    """Hidden layer of the feed-forward."""
    gate = times(gate_w, fed) + gate_b
    return (times(value_w, fed) + value_b) * 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))


@triton.jit
def node_at(nodes, mask, row, D: tl.constexpr):
    """A node, zeros if it is padding, and 1 if it is real, else 0."""
    real = tl.load(mask + row).to(tl.int32)
    node = tl.load(nodes + row * D + tl.arange(0, D), mask=(tl.arange(0, D) < D) & (real > 0), other=0.0)
    return node.to(tl.float32), real


@triton.jit(do_not_specialize=["rows", "slot_stride", "real_stride", "leaf_offset", "depth"])
def climb_pairs(
    nodes, mask, slots, norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    count, tokens, real, powers, offsets, rows, slot_stride, real_stride, leaf_offset, depth,
    HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, PRE: tl.constexpr, SCALE: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Put a token (tokens, (b, D)) on a leaf slot of one row of the batch, and compute all nodes above it.

    `nodes` (b, rows, D), `mask` and `count` (b, rows) are dense. Levels start at rows 2^l - 2, so siblings differ in
    their last bit alone.
    """
    batch = tl.program_id(0).to(tl.int64)
    slot, first = tl.load(slots + batch * slot_stride), batch * rows
    own_real = is_real(real, batch * real_stride)
    put_token(nodes, mask, count, tokens + batch * D, slot, own_real, powers, offsets, first, depth, D, LEVELS)
    at = slot + leaf_offset
    other, other_real = node_at(nodes, mask, first + (at ^ 1), D)
    q, key, value, out = matrix(q_w, D, D), matrix(kv_w, D, D), matrix(kv_w + D * D, D, D), matrix(out_w, D, D)
    up, gate, down = matrix(up_w, HIDDEN, D), matrix(up_w + HIDDEN * D, HIDDEN, D), matrix(down_w, D, HIDDEN)
    own = vector(tokens + batch * D, D).to(nodes.dtype.element_ty).to(tl.float32)
    for _ in range(depth):
        at = at // 2 - 1
        ahead, ahead_real = node_at(nodes, mask, first + (at ^ 1), D)
        norm, bias = vector(norm_w, D), vector(norm_b, D)
        own_normed, other_normed = normalise(own, norm, bias, D), normalise(other, norm, bias, D)
        own_context, other_context = (own_normed, other_normed) if PRE else (own, other)
        lead = times(key, own_context - other_context)
        own_value, other_value = times(value, own_context), times(value, other_context)
        own_away, other_away = sibling_weights(times(q, own_normed), times(q, other_normed), lead, own_real, other_real,
                                               HEADS, D // HEADS, SCALE)  # fmt: skip
        gap, bias = own_value - other_value, vector(out_b, D)
        own_out = (own if PRE else own_normed) + spread(times(out, own_value - own_away * gap)) + bias
        other_out = (other if PRE else other_normed) + spread(times(out, other_value + other_away * gap)) + bias
        norm, bias = vector(feed_w, D), vector(feed_b, D)
        own_fed, other_fed = normalise(own_out, norm, bias, D), normalise(other_out, norm, bias, D)
        up_bias, gate_bias = vector(up_b, HIDDEN), vector(up_b + HIDDEN, HIDDEN)
        hidden = own_real * gated(own_fed, up, up_bias, gate, gate_bias)
        hidden += other_real * gated(other_fed, up, up_bias, gate, gate_bias)
        total = own_real * (own_out if PRE else own_fed) + other_real * (other_out if PRE else other_fed)
        number = own_real + other_real  # the last layer is linear: one product serves the mean of both children
        own = (total + spread(times(down, hidden)) + number * vector(down_b, D)) / tl.maximum(number, 1)
        own = own.to(nodes.dtype.element_ty)
        tl.store(nodes + (first + at) * D + tl.arange(0, D), own)
        own, own_real = own.to(tl.float32), tl.minimum(number, 1)
        other, other_real = ahead, ahead_real


_climb = Launcher(climb_pairs)


def fits(plan: TreePlan, weights: LayerWeights) -> bool:
    """Whether the kernel can climb: a binary tree, and weights for which there are registers."""
    power = weights.hidden & (weights.hidden - 1) == 0
    return plan.branch == 2 and power and sum(weight.numel() for weight in weights.tensors) <= MOST_WEIGHTS


def climb_pairs_triton(
    nodes: Tensor,
    mask: Tensor,
    slots: Tensor,
    plan: TreePlan,
    weights: LayerWeights,
    count: Tensor,
    tokens: Tensor,
    real: Tensor | None,
) -> None:
    """Put dense `tokens` (b, 1, d) on `slots` (b, 1), and write all nodes above them in place; `fits` must be True."""
    dim, heads = nodes.shape[2], weights.heads
    sizes = (plan.nodes, slots.stride(0), 0 if real is None else real.stride(0), plan.leaf_offset, plan.depth)
    layer = (heads, dim, weights.hidden, weights.pre, (dim // heads) ** -0.5)
    constants = (*layer, triton.next_power_of_2(plan.depth + 1))
    with on_device_of(nodes):
        tensors = (nodes, mask, slots, *weights.tensors, count, tokens, real, *steps_of(plan, nodes.device))
        _climb(len(nodes), tensors, sizes, constants, num_warps=WARPS, num_stages=1)
