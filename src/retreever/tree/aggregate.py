"""Aggregators: how a node summarises its children (paper, equation h_v = Agg({h_u : u in C_v})).

An aggregator is called with the children of all g parents of a level at once: children (g, k, d) and mask (g, k), True
where a child is real, or None when all are. It returns (g, d), one summary per parent; a parent without real children
gets exactly 0. Any module with this signature can be used.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice
from retreever.nn.blocks import Residual, self_attention_block
from retreever.nn.plain import is_plain, plain_layer
from retreever.ops.aggregate.weights import LayerWeights
from retreever.ops.backend import Impl

Aggregator = Literal["transformer", "mean"]
AGGREGATORS: tuple[Aggregator, ...] = get_args(Aggregator)
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
    """One transformer layer among the children, then their mean: the paper's aggregator, one for all levels."""

    def __init__(
        self, dim: int, heads: int, hidden: int, residual: Residual = "pre", dropout: float = 0.0, impl: Impl = "auto"
    ) -> None:
        super().__init__()
        self.layer = self_attention_block(dim, heads, hidden, residual, dropout, impl)
        self.mean = MeanAggregator()

    def forward(self, children: Children, mask: ChildMask = None) -> Float[Tensor, "g d"]:
        # Without real children the softmax would be over nothing: let padding attend to itself, then drop the result.
        visible = None if mask is None else mask | ~mask.any(dim=1, keepdim=True)
        return self.mean(self.layer(children, children, visible), mask)


class Correction(nn.Module):
    """What is added to the means of keys and values below inner nodes, from embeddings of these; nothing at first."""

    def __init__(self, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, nodes: Float[Tensor, "b t d"]) -> Float[Tensor, "b t c"]:
        return self.down(F.gelu(self.up(self.norm(nodes))))


def make_aggregator(
    aggregator: Aggregator | nn.Module,
    dim: int,
    heads: int,
    hidden: int,
    residual: Residual,
    dropout: float,
    impl: Impl = "auto",
) -> nn.Module | None:
    """The aggregator of that name, or the user's own module as it is; None for "mean", which needs sums alone."""
    if isinstance(aggregator, nn.Module):
        return aggregator
    check_choice("aggregator", aggregator, AGGREGATORS)
    if aggregator == "mean":
        return None
    return TransformerAggregator(dim, heads, hidden, residual, dropout, impl)


def plain_weights(aggregator: nn.Module) -> LayerWeights | None:
    """Weights for the kernel that replaces `aggregator`; None unless it is exactly the plain one, without dropout."""
    if not is_plain(aggregator, TransformerAggregator):
        return None
    assert isinstance(aggregator, TransformerAggregator)
    if not is_plain(aggregator.mean, MeanAggregator):
        return None
    return plain_layer(aggregator.layer)
