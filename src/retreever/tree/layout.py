"""Which token lies on which leaf: the median split, for one length or for a ragged batch, by arithmetic alone.

A context of n real tokens spreads evenly over its leaf blocks: block j of B holds tokens floor(j*n/B) up to
floor((j+1)*n/B), so sizes differ by at most one, on every level of the tree (this is what median splits give).
In a ragged batch the tree is as deep as the longest context needs. A shorter context takes the leftmost subtree of
exactly the depth it would have alone; the nodes above have a single real child, so no decision is made there and the
result is that of the context alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retreever.tree.plan import TreePlan


@dataclass(frozen=True)
class LeafLayout:
    """Where the leaves come from: `index` (b, leaves) into the tokens, `real` (b, leaves) False at padding."""

    index: Int[Tensor, "b leaves"]
    real: Bool[Tensor, "b leaves"]


def leaf_layout(plan: TreePlan, lengths: Int[Tensor, " b"]) -> LeafLayout:
    """Token of every leaf slot when row i has its real tokens at 0..lengths[i]-1."""
    powers = plan.branch ** torch.arange(plan.depth + 1, device=lengths.device)
    depth = (powers[1:] < lengths[:, None]).sum(dim=1)  # each row's own depth: branch^d <= n - 1
    blocks = powers[depth][:, None]
    slot = torch.arange(plan.leaves, device=lengths.device)
    block, place = slot // plan.block, slot % plan.block
    start, stop = block * lengths[:, None] // blocks, (block + 1) * lengths[:, None] // blocks
    real = (block < blocks) & (place < stop - start)
    return LeafLayout(index=torch.where(real, start + place, 0), real=real)


def segment_of_rank(ranks: Int[Tensor, "b n"], lengths: Int[Tensor, "b 1"], segments: int) -> Int[Tensor, "b n"]:
    """Which of `segments` equal parts the token of each rank falls into, under the same even split."""
    return (segments * (ranks + 1) - 1) // lengths.clamp_min(1)
