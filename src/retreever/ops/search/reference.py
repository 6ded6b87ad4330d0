"""Tree attention in plain torch: every other backend is tested against it. Any dtype, any device.

One pass down the tree (paper, Algorithm 1). Policy and cross attention use the same scores, so each level scores its
children once and keeps the rejected ones; the leaves of the last block complete the selected set.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.ops.search.inputs import SearchInputs


class Descent(NamedTuple):
    """A walk down some levels: where it ended, and the children of every level it passed, with their scores."""

    path: Int[Tensor, "b m"]
    log_prob: Float[Tensor, "b m"]
    entropy: Float[Tensor, "b m"]
    scores: list[Float[Tensor, "b m k h"]]  # -inf at the child taken and at padding
    rows: list[Int[Tensor, "b m k"]]


def search_reference(
    inputs: SearchInputs,
) -> tuple[Float[Tensor, "b m h e"], Int[Tensor, "b m"], Float[Tensor, "b m"], Float[Tensor, "b m"]]:
    """Output, path, log_prob and entropy of every query.

    Half precision is computed in float32; log_prob and entropy are returned in float32, the output in the dtype of q.
    """
    q, keys, values, plan, node_mask = inputs[:5]
    dtype, q = q.dtype, q.to(torch.promote_types(q.dtype, torch.float32))
    path, log_prob, entropy, scores, rows = descend(inputs._replace(q=q), plan.depth)
    leaves = plan.leaf_offset + path[..., None] * plan.block + count_up(plan.block, path)
    scores = [*scores, score_rows(q, keys, node_mask, leaves, inputs.log_count)]
    weights = torch.cat(scores, dim=2).softmax(dim=2)  # (b, m, s, h)
    picked = pick_rows(values, torch.cat([*rows, leaves], dim=2), node_mask)  # (b, m, s, h, e)
    return (weights[..., None] * picked).sum(dim=2).to(dtype), path, log_prob, entropy


def descend(inputs: SearchInputs, levels: int) -> Descent:
    """Walk from the root to a node of level `levels`, in the dtype of q; only the nodes above are read."""
    q, keys, _, plan, node_mask, noise, choices, log_count = inputs[:8]
    b, m = q.shape[:2]
    path = torch.zeros(b, m, dtype=torch.int64, device=q.device)
    log_prob, entropy = q.new_zeros(b, m), q.new_zeros(b, m)
    scores, rows = [], []
    for level in range(1, levels + 1):
        children = plan.offsets[level] + path[..., None] * plan.branch + count_up(plan.branch, path)
        level_scores = score_rows(q, keys, node_mask, children, log_count)
        policy = level_scores.softmax(dim=2).mean(dim=3)  # (b, m, k): head mean of the attention weights
        chosen = _choose(policy, None if noise is None else noise[..., level - 1])
        if choices is not None:
            chosen = _forced(chosen, choices[..., level - 1], level_scores)
        # A policy may underflow to 0 for a real child; the clamp keeps 0 * log 0 at 0, also in the gradient.
        log_policy = policy.clamp_min(torch.finfo(policy.dtype).tiny).log()
        log_prob = log_prob + log_policy.gather(2, chosen[..., None])[..., 0]
        entropy = entropy - (policy * log_policy).sum(dim=2)
        taken = count_up(plan.branch, path) == chosen[..., None]
        scores.append(level_scores.masked_fill(taken[..., None], -torch.inf))
        rows.append(children)
        path = path * plan.branch + chosen
    return Descent(path, log_prob, entropy, scores, rows)


def count_up(length: int, like: Tensor) -> Int[Tensor, " length"]:
    """0, 1, ... on the device of `like`."""
    return torch.arange(length, device=like.device)


def pick_rows(
    nodes: Float[Tensor, "b t h e"], index: Int[Tensor, "b m s"], mask: Bool[Tensor, "b t"] | None
) -> Float[Tensor, "b m s h e"]:
    """nodes[b, index[b, m, s]] for every query; 0 at padding, which may hold NaN."""
    batch = torch.arange(nodes.shape[0], device=nodes.device)[:, None, None]
    picked = nodes[batch, index]
    return picked if mask is None else picked.masked_fill(~mask[batch, index][..., None, None], 0)


def score_rows(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    mask: Tensor | None,
    index: Int[Tensor, "b m s"],
    log_count: Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b m s h"]:
    """Scaled dot products of each query with the nodes of `index`, plus their log count; -inf at padding."""
    scores = (q[:, :, None] * pick_rows(keys, index, mask)).sum(dim=-1) * q.shape[-1] ** -0.5
    if log_count is not None:
        batch = torch.arange(log_count.shape[0], device=log_count.device)[:, None, None]
        scores = scores + log_count[batch, index][..., None]
    if mask is None:
        return scores
    batch = torch.arange(mask.shape[0], device=mask.device)[:, None, None]
    return scores.masked_fill(~mask[batch, index][..., None], -torch.inf)


def _choose(policy: Float[Tensor, "b m k"], noise: Float[Tensor, "b m"] | None) -> Int[Tensor, "b m"]:
    """The child to descend into: the first most likely one, or by inverse CDF when noise is given.

    A child of probability 0 (padding) is never chosen: its interval of the CDF is empty, and rounding at the upper
    end falls back to the last child that has any probability.
    """
    policy = policy.detach()
    if noise is None:
        return policy.argmax(dim=2)
    below = (noise[..., None] >= policy.cumsum(dim=2)).sum(dim=2)
    last = policy.shape[2] - 1 - (policy > 0).flip(2).to(torch.int8).argmax(dim=2)
    return torch.minimum(below, last)


def _forced(
    chosen: Int[Tensor, "b m"], choice: Int[Tensor, "b m"], scores: Float[Tensor, "b m k h"]
) -> Int[Tensor, "b m"]:
    """`choice` where that is a real child, else `chosen`."""
    real = (scores.detach() > -torch.inf).any(dim=3)
    valid = (choice >= 0) & (choice < real.shape[2])
    safe = torch.where(valid, choice, 0)
    return torch.where(valid & real.gather(2, safe[..., None])[..., 0], safe, chosen)
