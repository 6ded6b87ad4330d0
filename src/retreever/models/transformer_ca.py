"""Transformer + Cross Attention: every query attends to all n encoded tokens (paper, section 4)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from retreever.attention import CrossAttention
from retreever.batch import without_padding
from retreever.models.config import ModelConfig, embedding, encoder, head, resolve
from retreever.models.inputs import check_context
from retreever.models.plain import PlainModel
from retreever.results import KeyValues
from retreever.tree.order import in_order, leaf_order


class TransformerCA(PlainModel):
    """Encoder and plain cross attention. With the identity encoder this is Cross Attention of the copy task."""

    def __init__(self, config: ModelConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(ModelConfig, config, fields)
        c = self.config
        self.embed, self.encoder, self.head = embedding(c), encoder(c), head(c)
        # The paper code's doubled residual belongs to its tree attention alone.
        residual = "normalised" if c.residual == "doubled" else c.residual
        self.attention = CrossAttention(c.dim, c.heads, hidden=c.hidden, residual=residual, dropout=c.dropout)

    def encode(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> KeyValues:
        """Prepare a context once; `answer` it as often as wanted."""
        check_context(self.config, self.attention.block.to_q.weight, xc, yc, mask)
        tokens = self.embed.context(without_padding(xc, mask), without_padding(yc, mask))
        if mask is not None:  # encoders tied to positions want the real tokens first
            order = leaf_order("given", xc, mask)
            tokens, mask = in_order(tokens, order), in_order(mask, order)
        return self.attention.build(self.encoder(tokens, mask), mask)

    def tokens(self, n: int) -> int:
        """Tokens each query attends to when the context has `n`."""
        return n
