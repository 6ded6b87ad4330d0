"""How well the scores of inner nodes stand for the tokens below them: a teacher for the search, from attention itself.

Attention over all tokens gives every token a weight. A node's score is right if its exponential is the sum of those of
the tokens below it: then the search finds the weight, and whatever part of the tree is read, nodes count for as much as
their tokens would. The difference is measured on every level by the generalised Kullback-Leibler divergence, which has
a gradient at every node at once, where a reward tells a search only how one of its paths did.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.tree.build import Tree

LARGEST = 3.0  # log of how many times too large a score may be before its gradient is cut off


def mass_loss(q: Float[Tensor, "b m h e"], tree: Tree) -> Float[Tensor, "b m"]:
    """Divergence of the scores of inner nodes from the attention to their tokens, mean over levels and heads.

    0 where every score is right. The tokens' own keys get no gradient: they are the teacher.
    """
    plan, top = tree.plan, tree.plan.leaf_offset
    if not top:
        return q.new_zeros(q.shape[:2])
    scale = q.shape[-1] ** -0.5
    with torch.no_grad():
        leaves = _scores(q, tree, slice(top, None), scale)
        whole = leaves.logsumexp(dim=-1, keepdim=True)
        levels = [_sums((leaves - whole).exp(), plan.block)]
        for _ in range(plan.depth - 1):
            levels.append(_sums(levels[-1], plan.branch))
        masses = torch.cat(levels[::-1], dim=-1)
    scores = _scores(q, tree, slice(top), scale) - whole
    scores = scores.masked_fill(scores.isinf(), 0) if tree.mask is not None else scores
    surprise = torch.xlogy(masses, masses) - masses * scores  # masses log(masses / share)
    excess = scores.clamp_max(LARGEST).exp() - masses
    if tree.mask is not None:
        excess = excess.masked_fill(~tree.mask[:, None, None, :top], 0)
    return (surprise + excess).sum(dim=-1).mean(dim=-1) / plan.depth


def _scores(q: Float[Tensor, "b m h e"], tree: Tree, rows: slice, scale: float) -> Float[Tensor, "b m h rows"]:
    """Scores of nodes, with their log counts if the tree has them; -inf at padding."""
    scores = torch.einsum("bmhe,bthe->bmht", q, tree.keys[:, rows]) * scale
    if tree.log_count is not None:
        scores = scores + tree.log_count[:, None, None, rows]
    return scores if tree.mask is None else scores.masked_fill(~tree.mask[:, None, None, rows], -torch.inf)


def _sums(level: Float[Tensor, "b m h nodes"], children: int) -> Float[Tensor, "b m h parents"]:
    return level.reshape(*level.shape[:-1], -1, children).sum(dim=-1)
