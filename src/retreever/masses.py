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

from retreever.checks import check_tensor
from retreever.tree.value import Tree

LARGEST = 3.0  # of the log of a share; above, its exponential goes on in a straight line


def mass_loss(q: Float[Tensor, "b m h e"], tree: Tree, levels: int | None = None) -> Float[Tensor, "b m"]:
    """Divergence of the scores of inner nodes from the attention to their tokens, mean over levels and heads.

    0 where every score is right. The tokens' own keys get no gradient: they are the teacher.

    Args:
        q: queries as the search projects them, `tca.block.start(query)[1]`.
        tree: the nodes that are taught.
        levels: look at so many levels from the root; None looks at all.
    """
    b, _, h, e = tree.keys.shape
    check_tensor("q", q, "b m h e", b=b, h=h, e=e)
    plan = tree.plan
    depth = plan.depth if levels is None else min(levels, plan.depth)
    if not depth:
        return q.new_zeros(q.shape[:2])
    top, scale = plan.offsets[depth + 1], q.shape[-1] ** -0.5
    with torch.no_grad():
        leaves = _scores(q, tree, slice(plan.leaf_offset, None), scale)
        whole = leaves.logsumexp(dim=-1, keepdim=True)
        sums = [_sums((leaves - whole).exp(), plan.leaves // plan.branch**depth)]
        for _ in range(depth - 1):
            sums.append(_sums(sums[-1], plan.branch))
        masses = torch.cat(sums[::-1], dim=-1)
    scores = _scores(q, tree, slice(top), scale) - whole
    scores = scores.masked_fill(scores.isinf(), 0) if tree.mask is not None else scores
    surprise = torch.xlogy(masses, masses) - masses * scores  # masses log(masses / share)
    excess = _exp(scores) - masses
    if tree.mask is not None:
        excess = excess.masked_fill(~tree.mask[:, None, None, :top], 0)
    return (surprise + excess).sum(dim=-1).mean(dim=-1) / depth


def _exp(scores: Float[Tensor, "b m h rows"]) -> Float[Tensor, "b m h rows"]:
    """The exponential, and its tangent where it would explode; a constant there would let scores grow for ever."""
    return scores.clamp_max(LARGEST).exp() * (1 + (scores - LARGEST).clamp_min(0))


def _scores(q: Float[Tensor, "b m h e"], tree: Tree, rows: slice, scale: float) -> Float[Tensor, "b m h rows"]:
    """Scores of nodes, with their log counts if the tree has them; -inf at padding."""
    scores = torch.einsum("bmhe,bthe->bmht", q, tree.keys[:, rows]) * scale
    if tree.log_count is not None:
        scores = scores + tree.log_count[:, None, None, rows]
    return scores if tree.mask is None else scores.masked_fill(~tree.mask[:, None, None, rows], -torch.inf)


def _sums(level: Float[Tensor, "b m h nodes"], children: int) -> Float[Tensor, "b m h parents"]:
    return level.reshape(*level.shape[:-1], -1, children).sum(dim=-1)
