"""Numba kernel of one way up a tree: the paper's aggregator on every node above a changed leaf, one after the other.

Inference only. In plain torch a level is about thirty small operations, and their calls take ten times longer than
their arithmetic: at a million tokens the way up has 19 levels.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import erf, exp, sqrt
from typing import Any

import numpy as np
from torch import Tensor

from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.search.lanes_numba import kernel, part
from retreever.tree.plan import TreePlan

EPSILON = 1e-5
# Sums may be reordered, so that their loops become vector instructions.
loops: Callable[..., Any] = partial(part, fastmath={"reassoc", "contract"})


@loops
def normalise(x, weight, bias, out):
    """Layer norm of the rows of x."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        mean = x[row, 0] * 0
        for i in range(width):
            mean += x[row, i]
        mean /= width
        variance = mean * 0
        for i in range(width):
            variance += (x[row, i] - mean) ** 2
        scale = 1 / sqrt(variance / width + EPSILON)
        for i in range(width):
            out[row, i] = (x[row, i] - mean) * scale * weight[i] + bias[i]


@loops
def project(x, weight, out):
    """out = x @ W.T for a torch Linear weight W (out, in)."""
    for column in range(weight.shape[0]):
        for row in range(x.shape[0]):
            total = x[row, 0] * 0
            for i in range(x.shape[1]):
                total += weight[column, i] * x[row, i]
            out[row, column] = total


@loops
def attend(q, kv, heads, mixed):
    """Attention of all rows to one another; keys and values are the halves of kv."""
    rows, dim = q.shape
    width = dim // heads
    scores = np.empty(rows, q.dtype)
    for row in range(rows):
        for head in range(heads):
            start = head * width
            largest = q[0, 0] * 0 - np.inf
            for other in range(rows):
                score = q[0, 0] * 0
                for i in range(start, start + width):
                    score += q[row, i] * kv[other, i]
                scores[other] = score / sqrt(width)
                largest = max(largest, scores[other])
            total = q[0, 0] * 0
            for other in range(rows):
                scores[other] = exp(scores[other] - largest)
                total += scores[other]
            for i in range(start, start + width):
                mixed[row, i] = 0
                for other in range(rows):
                    mixed[row, i] += scores[other] / total * kv[other, dim + i]


@loops
def feed(fed, up, up_bias, down, down_bias, lifted, gated, out):
    """out += the gated feed-forward layer of `fed`."""
    hidden = down.shape[1]
    project(fed, up, lifted)
    for row in range(fed.shape[0]):
        for i in range(hidden):
            gate = lifted[row, hidden + i] + up_bias[hidden + i]
            gated[row, i] = (lifted[row, i] + up_bias[i]) * gate * (1 + erf(gate / sqrt(2.0))) / 2
        for column in range(down.shape[0]):
            total = down_bias[column]
            for i in range(hidden):
                total += down[column, i] * gated[row, i]
            out[row, column] += total


@kernel
def climb(nodes, mask, slots, offsets, branch, heads, pre, norm_w, norm_b, to_q, to_kv, to_out, out_b, feed_w, feed_b,
          up, up_b, down, down_b):  # fmt: skip
    """Write the nodes above `slots`, one leaf slot of every row, from the last level up."""
    dim = nodes.shape[2]
    x = np.empty((branch, dim), nodes.dtype)
    normed, q, mixed, fed = np.empty_like(x), np.empty_like(x), np.empty_like(x), np.empty_like(x)
    kv = np.empty((branch, 2 * dim), nodes.dtype)
    lifted = np.empty((branch, len(up)), nodes.dtype)
    gated = np.empty((branch, down.shape[1]), nodes.dtype)
    for row in range(len(slots)):
        place = slots[row]
        for level in range(len(offsets) - 2, 0, -1):
            place //= branch
            first, real = offsets[level + 1] + place * branch, 0
            for child in range(first, first + branch):
                if mask[row, child]:
                    x[real] = nodes[row, child]
                    real += 1
            parent = nodes[row, offsets[level] + place]
            parent[:] = 0
            if real == 0:
                continue
            normalise(x[:real], norm_w, norm_b, normed)
            project(normed[:real], to_q, q)
            project(normed[:real] if pre else x[:real], to_kv, kv)
            attend(q[:real], kv, heads, mixed)
            project(mixed[:real], to_out, q)
            for child in range(real):
                for i in range(dim):
                    x[child, i] = (x[child, i] if pre else normed[child, i]) + q[child, i] + out_b[i]
            normalise(x[:real], feed_w, feed_b, fed)
            if not pre:
                x[:real] = fed[:real]
            feed(fed[:real], up, up_b, down, down_b, lifted, gated, x)
            for child in range(real):
                for i in range(dim):
                    parent[i] += x[child, i] / real


def climb_numba(nodes: Tensor, mask: Tensor, slots: Tensor, plan: TreePlan, weights: LayerWeights) -> None:
    """Write the nodes (b, t, d) above leaf `slots` (b, 1) in place."""
    arrays = [weight.detach().numpy() for weight in weights.tensors]
    offsets = np.array(plan.offsets, np.int64)
    climb(nodes.numpy(), mask.numpy(), slots[:, 0].numpy(), offsets, plan.branch, weights.heads, weights.pre, *arrays)
