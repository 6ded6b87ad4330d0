"""Transformer + Cross Attention: every query attends to all n encoded tokens (paper, section 4)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.attention import CrossAttention
from retreever.batch import Batch, without_padding
from retreever.models.config import ModelConfig, embedding, encoder, head, resolve
from retreever.models.inputs import check_context, check_queries, take_targets
from retreever.objective import Loss, masked_mean
from retreever.results import KeyValues
from retreever.tree.order import in_order, leaf_order


class TransformerCA(nn.Module):
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

    def answer(self, memory: KeyValues, xt: Float[Tensor, "b m dx"]) -> Distribution:
        """Predictions at `xt` from a prepared context."""
        check_queries(self.config, self.attention.block.to_q.weight, xt, memory.keys.shape[0])
        return self.head(self.attention(self.embed.query(xt), memory).output)

    def predict(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        xt: Float[Tensor, "b m dx"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); `mask` is True where a context point is real."""
        return self.answer(self.encode(xc, yc, mask), xt)

    def loss(self, batch: Batch) -> Loss:
        """Task loss, mean over real targets."""
        xt, yt = take_targets(self.config, batch)
        dist = self.predict(batch.xc, batch.yc, xt, batch.context_mask)
        return Loss.only_task(masked_mean(self.head.loss(dist, yt), batch.target_mask))

    def tokens(self, n: int) -> int:
        """Tokens each query attends to when the context has `n`."""
        return n
