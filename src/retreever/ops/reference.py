"""Tree attention in plain torch: the oracle every other backend is measured against. Any dtype, any device.

One pass down the tree (paper, Algorithm 1). The scores that choose a child are the scores the cross attention needs, so
each level scores its children once, keeps the rejected ones, and the leaves of the last block complete the set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.tree.plan import TreePlan


def tree_attention_reference(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None,
    noise: Float[Tensor, "b m depth"] | None,
) -> tuple[Float[Tensor, "b m h e"], Int[Tensor, "b m"], Float[Tensor, "b m"], Float[Tensor, "b m"]]:
    """Search, then attend to the selected set. Returns output, path, log_prob, entropy.

    Half precision is computed in float32; log_prob and entropy stay there, the output returns to the dtype of q.
    """
    b, m = q.shape[:2]
    dtype, q = q.dtype, q.to(torch.promote_types(q.dtype, torch.float32))
    path = torch.zeros(b, m, dtype=torch.int64, device=q.device)
    log_prob, entropy = q.new_zeros(b, m), q.new_zeros(b, m)
    scores, rows = [], []
    for level in range(1, plan.depth + 1):
        children = plan.offset(level) + path[..., None] * plan.branch + _range(plan.branch, path)
        level_scores = _score(q, keys, node_mask, children)
        policy = level_scores.softmax(dim=2).mean(dim=3)  # (b, m, k): head mean of the attention weights
        chosen = _choose(policy, None if noise is None else noise[..., level - 1])
        # A policy may underflow to 0 for a real child; the clamp keeps 0 * log 0 at 0, also in the gradient.
        log_policy = policy.clamp_min(torch.finfo(policy.dtype).tiny).log()
        log_prob = log_prob + log_policy.gather(2, chosen[..., None])[..., 0]
        entropy = entropy - (policy * log_policy).sum(dim=2)
        taken = _range(plan.branch, path) == chosen[..., None]
        scores.append(level_scores.masked_fill(taken[..., None], -torch.inf))
        rows.append(children)
        path = path * plan.branch + chosen
    leaves = plan.leaf_offset + path[..., None] * plan.block + _range(plan.block, path)
    scores.append(_score(q, keys, node_mask, leaves))
    rows.append(leaves)
    weights = torch.cat(scores, dim=2).softmax(dim=2)  # (b, m, s, h)
    picked = _rows(values, torch.cat(rows, dim=2))  # (b, m, s, h, e)
    return (weights[..., None] * picked).sum(dim=2).to(dtype), path, log_prob, entropy


def full_attention_reference(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b m h e"]:
    """Cross attention over all real leaves: the read-out of ReTreever-Full and of the L_CA term."""
    mask = None if node_mask is None else node_mask[:, None, None, plan.leaf_offset :]
    leaf_keys, leaf_values = keys[:, plan.leaf_offset :], values[:, plan.leaf_offset :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), leaf_keys.transpose(1, 2), leaf_values.transpose(1, 2), attn_mask=mask
    )
    return out.transpose(1, 2)


def _range(length: int, like: Tensor) -> Int[Tensor, " length"]:
    return torch.arange(length, device=like.device)


def _rows(nodes: Tensor, index: Int[Tensor, "b m s"]) -> Tensor:
    """nodes[b, index[b, m, s]] for every query."""
    batch = torch.arange(nodes.shape[0], device=nodes.device)[:, None, None]
    return nodes[batch, index]


def _score(
    q: Float[Tensor, "b m h e"], keys: Float[Tensor, "b t h e"], mask: Tensor | None, index: Int[Tensor, "b m s"]
) -> Float[Tensor, "b m s h"]:
    """Scaled dot products of each query with the nodes of `index`; -inf at nodes that are padding."""
    scores = (q[:, :, None] * _rows(keys, index)).sum(dim=-1) * q.shape[-1] ** -0.5
    return scores if mask is None else scores.masked_fill(~_rows(mask, index)[..., None], -torch.inf)


def _choose(policy: Float[Tensor, "b m k"], noise: Float[Tensor, "b m"] | None) -> Int[Tensor, "b m"]:
    """The child to descend into: the first most likely one, or by inverse CDF when noise is given; noise 2 + c is c.

    A child of probability 0 (padding) is never chosen: its interval of the CDF is empty, and rounding at the upper
    end falls back to the last child that has any probability.
    """
    policy = policy.detach()
    if noise is None:
        return policy.argmax(dim=2)
    said = torch.arange(3, 3 + policy.shape[2], device=policy.device, dtype=policy.dtype)  # 2 + c is above c of them
    bounds = torch.where(noise[..., None] >= 2, said, policy.cumsum(dim=2))
    below = (noise[..., None] >= bounds).sum(dim=2)
    last = policy.shape[2] - 1 - (policy > 0).flip(2).to(torch.int8).argmax(dim=2)
    return torch.minimum(below, last)
