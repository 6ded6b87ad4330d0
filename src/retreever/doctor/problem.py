"""Small searches whose answers are known: the walk down the tree, written out step by step for one query at a time.

This shares no code with the backends. Inputs are chosen so that no decision on the way down is close enough for
rounding to turn it, so every backend must take the same path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from retreever.tree.aggregate import MeanAggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan

Array = np.ndarray[Any, np.dtype[Any]]
MARGIN = 1e-2  # a decision at least this far, in probability, from falling otherwise


@dataclass(frozen=True)
class Problem:
    """Inputs of one search, and the slopes that turn its output, log_prob and entropy into a loss."""

    title: str
    plan: TreePlan
    inputs: tuple[Array, ...]  # q (b, m, h, e), keys and values (b, t, h, e)
    mask: Array | None
    noise: Array | None
    slopes: tuple[Array, ...]

    @property
    def directions(self) -> list[Array]:
        """One for each of q, keys and values, to measure gradients along."""
        return [np.cos(np.arange(x.size)).reshape(x.shape) for x in self.inputs]


class Walk(NamedTuple):
    """What the walks of all queries came to; `margin` is how far the closest decision of each was from another."""

    output: Array
    path: Array
    log_prob: Array
    entropy: Array
    margin: Array


def problems() -> tuple[Problem, Problem]:
    """One with all nodes real and the best child taken, one with ragged contexts and sampled children."""
    argmax = make_problem("argmax", [16], m=17, branch=2)  # a query more than a vector of the CPU kernels holds
    return argmax, make_problem("mask and noise", [13, 4], m=3, branch=3, sampled=True)


def make_problem(title: str, lengths: list[int], m: int, branch: int, sampled: bool = False) -> Problem:
    """The first random problem of m queries over contexts of these lengths in which every decision is clear."""
    tokens = torch.zeros(len(lengths), max(lengths), 1)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    plan, _, mask = build_nodes(tokens, MeanAggregator(), branch, None if real.all() else real)
    empty = Problem(title, plan, (), None if mask is None else mask.numpy(), None, ())
    drawn = (_draw(empty, len(lengths), m, sampled, np.random.default_rng(seed)) for seed in count())
    return next(problem for problem in drawn if walk(problem).margin.min() >= MARGIN)


def _draw(empty: Problem, b: int, m: int, sampled: bool, random: np.random.Generator) -> Problem:
    """The problem with random inputs and slopes."""
    query, nodes = (b, m, 2, 16), (b, empty.plan.nodes, 2, 16)
    q, keys, values, *slopes = (
        random.standard_normal(shape).astype(np.float32).astype(np.float64)  # the same number in both precisions
        for shape in (query, nodes, nodes, query, (b, m), (b, m))
    )
    noise = random.random((b, m, empty.plan.depth), np.float32).astype(np.float64) if sampled else None
    return replace(empty, inputs=(q, keys, values), noise=noise, slopes=tuple(slopes))


def walk(problem: Problem) -> Walk:
    """Every query's search, one after the other."""
    q, keys, values = problem.inputs
    b, m = q.shape[:2]
    real = np.ones(keys.shape[:2], bool) if problem.mask is None else problem.mask
    noise = problem.noise
    found = [
        _walk_one(q[i, j], keys[i], values[i], problem.plan, real[i], None if noise is None else noise[i, j])
        for i in range(b)
        for j in range(m)
    ]
    return Walk(*(np.array(part).reshape(b, m, *np.shape(part[0])) for part in zip(*found, strict=True)))


def _walk_one(
    q: Array, keys: Array, values: Array, plan: TreePlan, real: Array, noise: Array | None
) -> tuple[Array, int, float, float, float]:
    """Output, path, log_prob, entropy and margin of one query (h, e) over nodes (t, h, e)."""
    selected: list[int] = []
    node, log_prob, entropy, margin = 0, 0.0, 0.0, 1.0
    for level in range(1, plan.depth + 1):
        first = plan.offset(level) + node * plan.branch
        children = [row for row in range(first, first + plan.branch) if real[row]]
        policy = _weights(q, keys[children]).mean(axis=1)
        chosen, gap = _decide(policy, None if noise is None else noise[level - 1])
        margin = min(margin, gap)
        log_prob += math.log(policy[chosen])
        entropy -= sum(p * math.log(p) for p in policy)
        node = children[chosen] - plan.offset(level)
        selected += children[:chosen] + children[chosen + 1 :]
    first = plan.leaf_offset + node * plan.block
    selected += [row for row in range(first, first + plan.block) if real[row]]
    output = (_weights(q, keys[selected])[..., None] * values[selected]).sum(axis=0)
    return output, node, log_prob, entropy, margin


def _weights(q: Array, keys: Array) -> Array:
    """Softmax over the nodes (s, h) of the scaled products of each head."""
    scores = (keys * q).sum(axis=2) / math.sqrt(q.shape[1])
    odds = np.exp(scores - scores.max(axis=0))
    return odds / odds.sum(axis=0)


def _decide(policy: Array, noise: float | None) -> tuple[int, float]:
    """The child taken, and by how much of probability."""
    if noise is None:
        chosen = int(policy.argmax())
        return chosen, min(policy[chosen] - np.delete(policy, chosen), default=1.0)
    edges = policy.cumsum()[:-1]
    return int((edges <= noise).sum()), min(abs(edges - noise), default=1.0)


def derivatives(problem: Problem, step: float = 1e-5) -> list[float]:
    """How the loss of the walk changes with q, keys and values along their directions, by central differences."""

    def loss(which: int, shift: float) -> float:
        inputs = list(problem.inputs)
        inputs[which] = inputs[which] + shift * problem.directions[which]
        found = walk(replace(problem, inputs=tuple(inputs)))
        pairs = zip((found.output, found.log_prob, found.entropy), problem.slopes, strict=True)
        return float(sum((result * slope).sum() for result, slope in pairs))

    return [(loss(which, step) - loss(which, -step)) / (2 * step) for which in range(3)]
