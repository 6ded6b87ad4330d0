"""Aggregators: how a node summarises its children (paper, equation h_v = Agg({h_u : u in C_v})).

Called with all sibling groups of a level at once: children (g, k, d) and mask (g, k), True where a child is real, or
None when all are. Returns (g, d); a group without real children gives exactly 0. Any module of this form will do.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice
from retreever.nn.blocks import Residual, self_attention_block

Aggregator = Literal["transformer", "mean"]
AGGREGATORS: tuple[Aggregator, ...] = ("transformer", "mean")
Children = Float[Tensor, "g k d"]
ChildMask = Bool[Tensor, "g k"] | None


class MeanAggregator(nn.Module):
    """The mean of the real children."""

    def forward(self, children: Children, mask: ChildMask = None) -> Float[Tensor, "g d"]:
        if mask is None:
            return children.mean(dim=1)
        total = children.masked_fill(~mask[..., None], 0).sum(dim=1)
        return total / mask.sum(dim=1, keepdim=True).clamp_min(1)


class TransformerAggregator(nn.Module):
    """One transformer layer among the children, then their mean: the paper's aggregator, one for all levels.

    `fused = False` leaves training to torch, level by level.
    """

    fused = True

    def __init__(self, dim: int, heads: int, hidden: int, residual: Residual = "pre", dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = self_attention_block(dim, heads, hidden, residual, dropout)
        self.mean = MeanAggregator()

    def forward(self, children: Children, mask: ChildMask = None) -> Float[Tensor, "g d"]:
        # A group of padding alone would have a softmax over nothing: let it attend to itself, then drop the result.
        visible = None if mask is None else mask | ~mask.any(dim=1, keepdim=True)
        return self.mean(self.layer(children, children, visible), mask)


def make_aggregator(
    aggregator: Aggregator | nn.Module, dim: int, heads: int, hidden: int, residual: Residual, dropout: float
) -> nn.Module:
    """The aggregator of that name, or the user's own module as it is."""
    if isinstance(aggregator, nn.Module):
        return aggregator
    check_choice("aggregator", aggregator, AGGREGATORS)
    if aggregator == "mean":
        return MeanAggregator()
    return TransformerAggregator(dim, heads, hidden, residual, dropout)
