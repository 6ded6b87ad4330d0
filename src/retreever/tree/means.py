"""Trees of means: every node is the mean of the keys and values of the tokens below it, built by sums alone.

With the logarithm of its number of tokens added to its score, such a node stands for all of them in an attention that
was trained without a tree.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from retreever.ops.gradients import needs_gradient
from retreever.tree.build import leaves_of, level_masks, plan_for
from retreever.tree.plan import TreePlan

Heads = Float[Tensor, "b _ h e"]


def mean_tree(
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    branch: int,
    mask: Bool[Tensor, "b n"] | None,
    capacity: int | None = None,
) -> tuple[TreePlan, Heads, Heads, Bool[Tensor, "b t"] | None]:
    """Plan, keys and values of all nodes over tokens in leaf order, and node mask. Padding holds finite numbers.

    `capacity` is that of `build_nodes`.
    """
    b, n, h, e = keys.shape
    plan = plan_for(n, branch, mask is not None, capacity)
    plain = not (needs_gradient(keys, values) or torch.compiler.is_compiling())
    if plain and mask is None and plan.full and capacity is None:
        return plan, *_filled(plan, keys, values), None
    plan, nodes, node_mask = mean_nodes(torch.stack([keys, values], dim=2).flatten(2), branch, mask, capacity)
    pairs = nodes.view(b, plan.nodes, 2, h, e)  # not unbound: torch would refuse to write into the parts
    return plan, pairs[:, :, 0], pairs[:, :, 1], node_mask


def mean_nodes(
    tokens: Float[Tensor, "b n c"], branch: int, mask: Bool[Tensor, "b n"] | None, capacity: int | None = None
) -> tuple[TreePlan, Float[Tensor, "b t c"], Bool[Tensor, "b t"] | None]:
    """Plan, means of the tokens below all nodes, and node mask, with gradients. Padding holds finite numbers."""
    plan = plan_for(tokens.shape[1], branch, mask is not None, capacity)
    leaves, real = leaves_of(tokens, plan, mask, capacity is not None)
    levels = [leaves]
    if real is None:  # all blocks are full, so that means of means are means
        for level in range(plan.depth, 0, -1):
            levels.append(_mean(_grouped(levels[-1], plan.branch**level)))
        return plan, torch.cat(levels[::-1], dim=1), None
    counts = _counts(plan, real, torch.promote_types(leaves.dtype, torch.float32))
    sums = leaves.to(counts[0].dtype)
    for level, count in zip(range(plan.depth, 0, -1), counts[1:], strict=True):
        sums = _grouped(sums, plan.branch**level).sum(dim=2)
        levels.append((sums / count.clamp_min(1)[..., None]).to(leaves.dtype))
    return plan, torch.cat(levels[::-1], dim=1), torch.cat(level_masks(plan, real)[::-1], dim=1)


def _filled(plan: TreePlan, keys: Heads, values: Heads) -> tuple[Heads, Heads]:
    """Keys and values of a full tree, where no gradient is needed: all levels are written in their place."""
    nodes = keys.new_empty(keys.shape[0], plan.nodes, 2, *keys.shape[2:])
    nodes[:, plan.leaf_offset :, 0], nodes[:, plan.leaf_offset :, 1] = keys, values
    flat, stop = nodes.flatten(2), plan.nodes
    for level in range(plan.depth, 0, -1):
        start, middle = plan.offsets[level : level + 2]
        _mean(_grouped(flat[:, middle:stop], plan.branch**level), out=flat[:, start:middle])
        stop = middle
    return nodes[:, :, 0], nodes[:, :, 1]


def _mean(children: Float[Tensor, "b parents k c"], out: Tensor | None = None) -> Float[Tensor, "b parents c"]:
    """Means of children; of pairs by `lerp`, which is several times faster than a sum over two."""
    if children.shape[2] == 2:
        return torch.lerp(children[:, :, 0], children[:, :, 1], 0.5, out=out)
    return torch.mean(children, dim=2, out=out)


def log_counts(plan: TreePlan, node_mask: Bool[Tensor, "b t"] | None, like: Tensor) -> Float[Tensor, "b t"]:
    """Logarithm of the number of real tokens below every node, at least 0."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if node_mask is None:
        real = torch.ones(1, plan.leaves, dtype=torch.bool, device=like.device)
    else:
        real = node_mask[:, plan.leaf_offset :]
    counts = torch.cat(_counts(plan, real, dtype)[::-1], dim=1)
    return counts.clamp_min(1).log().expand(like.shape[0], -1)


def node_counts(plan: TreePlan, node_mask: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Number of real tokens below every node."""
    counts = _counts(plan, node_mask[:, plan.leaf_offset :], torch.int32)
    return torch.cat(counts[::-1], dim=1)


def _counts(plan: TreePlan, real: Bool[Tensor, "b leaves"], dtype: torch.dtype) -> list[Shaped[Tensor, "b _"]]:
    """Real tokens below the nodes of every level, from the leaves up."""
    counts = [real.to(dtype)]
    for level in range(plan.depth, 0, -1):
        counts.append(_grouped(counts[-1], plan.branch**level).sum(dim=2, dtype=dtype))
    return counts


def _grouped(level: Shaped[Tensor, "b nodes *c"], parents: int) -> Shaped[Tensor, "b parents k *c"]:
    """The nodes of a level by their parents."""
    return level.reshape(level.shape[0], parents, level.shape[1] // parents, *level.shape[2:])
