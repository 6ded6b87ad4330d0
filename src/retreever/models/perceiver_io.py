"""Perceiver IO: the context is distilled into L latents, and queries attend to those (paper, section 2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from retreever.arguments import check_int
from retreever.attention import CrossAttention
from retreever.batch import without_padding
from retreever.models.config import ModelConfig, embedding, head, resolve
from retreever.models.inputs import check_context
from retreever.models.plain import PlainModel
from retreever.nn.blocks import Residual, self_attention_block
from retreever.results import KeyValues


@dataclass(frozen=True)
class PerceiverIOConfig(ModelConfig):
    """Settings of Perceiver IO.

    Attributes:
        latents: number of latents L, the tokens each query attends to.
        iterative: cross-attend to the context in every block, as the paper describes; False does so once, in front of
            the self-attention blocks.
    """

    latents: int = 8
    iterative: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("latents", self.latents, 1)


class PerceiverIO(PlainModel):
    """`layers` blocks of Latents <- SelfAttention(CrossAttention(Latents, context)), then one cross attention."""

    config: PerceiverIOConfig

    def __init__(self, config: PerceiverIOConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(PerceiverIOConfig, config, fields)
        c = self.config
        self.embed, self.head = embedding(c), head(c)
        residual: Residual = "normalised" if c.residual == "doubled" else c.residual
        self.latents = nn.Parameter(torch.randn(c.latents, c.dim))
        rounds = c.layers if c.iterative else 1
        self.distil = nn.ModuleList(
            CrossAttention(c.dim, c.heads, hidden=c.hidden, residual=residual, dropout=c.dropout) for _ in range(rounds)
        )
        self.mix = nn.ModuleList(
            self_attention_block(c.dim, c.heads, c.hidden, residual, c.dropout) for _ in range(c.layers)
        )
        self.attention = CrossAttention(c.dim, c.heads, hidden=c.hidden, residual=residual, dropout=c.dropout)

    def encode(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> KeyValues:
        """Distil a context into latents once; `answer` it as often as wanted."""
        check_context(self.config, self.attention.block.to_q.weight, xc, yc, mask)
        tokens = self.embed.context(without_padding(xc, mask), without_padding(yc, mask))
        latents = self.latents.expand(tokens.shape[0], -1, -1)
        for index, mix in enumerate(self.mix):
            if index < len(self.distil):
                latents = self.distil[index](latents, tokens, mask).output
            latents = mix(latents, latents)
        return self.attention.build(latents)

    def tokens(self, n: int) -> int:
        """Tokens each query attends to, whatever the context."""
        return self.config.latents
