"""Transformer + Cross Attention: every query attends to all n encoded tokens (paper, section 4)."""

from __future__ import annotations

from typing import Any

from torch.distributions import Distribution

from retreever.cross_attention import CrossAttention
from retreever.models.base import Contexts, Mask, Model, Targets, Values
from retreever.models.config import ModelConfig, embedding, encoder, head, read_out, resolve
from retreever.nn.encoders import encode_tokens
from retreever.results import KeyValues
from retreever.tree.order import in_order, permutation_of


class TransformerCA(Model):
    """Encoder and plain cross attention. With the identity encoder this is Cross Attention of the copy task."""

    memory = KeyValues

    def __init__(self, config: ModelConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(ModelConfig, config, fields)
        self.embed, self.encoder, self.head = embedding(self.config), encoder(self.config), head(self.config)
        self.attention = CrossAttention(**read_out(self.config))

    def tokens(self, n: int) -> int:
        """All `n` context tokens."""
        return n

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> KeyValues:
        tokens = self.embed.context(xc, yc)
        if mask is not None:  # encoders that depend on positions need the real tokens first
            order = permutation_of("given", xc, mask, 2, 0, 0)
            tokens, mask = in_order(tokens, order), in_order(mask, order)
        return self.attention.build(encode_tokens(self.encoder, tokens, mask), mask, check=False)

    def _answer(self, memory: KeyValues, xt: Targets) -> Distribution:
        return self.head(self.attention(self.embed.query(xt), memory, check=False).output)
