"""Perceiver IO: the context is distilled into L latents, and queries attend to those (paper, section 2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from retreever.arguments import check_bool, check_int
from retreever.cross_attention import CrossAttention
from retreever.models.base import Contexts, Mask, Model, Targets, Values
from retreever.models.config import ModelConfig, embedding, head, layer_residual, read_out, resolve
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
        check_bool("iterative", self.iterative)

    @property
    def best_residual(self) -> Residual:
        """Perceiver IO is not stable with residuals on normalised inputs."""
        return "pre"


class PerceiverIO(Model):
    """`layers` blocks of Latents <- SelfAttention(CrossAttention(Latents, context)), then one cross attention."""

    config: PerceiverIOConfig
    memory = KeyValues

    def __init__(self, config: PerceiverIOConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(PerceiverIOConfig, config, fields)
        c = self.config
        self.embed, self.head = embedding(c), head(c)
        self.latents = nn.Parameter(torch.randn(c.latents, c.dim))
        rounds = c.layers if c.iterative else 1
        self.distil = nn.ModuleList(CrossAttention(**read_out(c)) for _ in range(rounds))
        self.mix = nn.ModuleList(
            self_attention_block(c.dim, c.heads, c.hidden, layer_residual(c), c.dropout, c.impl)
            for _ in range(c.layers)
        )
        self.attention = CrossAttention(**read_out(c))

    def tokens(self, n: int) -> int:
        """The number of latents, whatever `n`."""
        return self.config.latents

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> KeyValues:
        tokens = self.embed.context(xc, yc)
        latents = self.latents.expand(tokens.shape[0], -1, -1)
        for index, mix in enumerate(self.mix):
            if index < len(self.distil):
                latents = self.distil[index](latents, tokens, mask, check=False).output
            latents = mix(latents, latents)
        return self.attention.build(latents, check=False)

    def _answer(self, memory: KeyValues, xt: Targets) -> Distribution:
        return self.head(self.attention(self.embed.query(xt), memory, check=False).output)
