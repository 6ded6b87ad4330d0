"""LBANP (Feng et al., 2023): the context is distilled into L latents, which every layer of the decoder reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributions import Distribution

from retreever.arguments import check_choice, check_int, check_number
from retreever.models.base import Contexts, Mask, Model, Targets, Values
from retreever.models.config import AnyConfig, resolve
from retreever.nn.blocks import AttentionBlock
from retreever.nn.embed import PointEmbed
from retreever.nn.heads import make_head
from retreever.results import KeyValues, LayerMemory


@dataclass(frozen=True)
class LBANPConfig(AnyConfig):
    """Settings of LBANP.

    Attributes:
        latents: number of latents L, the tokens each query attends to in every layer.
        layers: blocks of the encoder, and layers of the decoder.
        hidden: width of feed-forward layers and of the head.
        dropout: on attention weights and feed-forward.
        residual: "normalised", LN x + f(LN x) as published, or "pre", x + f(LN x).
        embed_depth: layers of the embedding.
    """

    latents: int = 8
    layers: int = 6
    hidden: int = 128
    dropout: float = 0.0
    residual: Literal["normalised", "pre"] = "normalised"
    embed_depth: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.points_only()
        for name in ("latents", "layers", "hidden", "embed_depth"):
            check_int(name, getattr(self, name), 1)
        check_number("dropout", self.dropout, below=1.0)
        check_choice("residual", self.residual, ("normalised", "pre"))


class LBANP(Model):
    """Latent bottlenecked attentive neural process.

    Encoder blocks: latents <- SelfAttention(CrossAttention(latents, context)). Layer l of the decoder reads the latents
    of block l.
    """

    config: LBANPConfig
    memory = LayerMemory
    settings: ClassVar[type[LBANPConfig]] = LBANPConfig

    def __init__(self, config: LBANPConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(self.settings, config, fields)
        c = self.config
        self.embed = PointEmbed(c.dim_x, c.dim_y, c.dim, c.embed_depth, nn.ReLU)
        self.head = make_head(c.head, c.dim, c.hidden, c.out, norm=True)
        self.latents = nn.Parameter(torch.randn(c.latents, c.dim))
        self.distil, self.mix, self.read_out = (self._blocks(norm) for norm in ("own", "shared", "own"))

    def tokens(self, n: int) -> int:
        """The number of latents, whatever `n`."""
        return self.config.latents

    def _blocks(self, context_norm: str) -> Any:
        """A block per layer: cross attention with a norm of its "own" for the context, or self-attention ("shared")."""
        c = self.config
        settings: dict[str, Any] = {"hidden": c.hidden, "dropout": c.dropout, "impl": c.impl}
        settings |= {"residual": c.residual, "context_norm": context_norm}
        return nn.ModuleList(AttentionBlock(c.dim, c.heads, **settings) for _ in range(c.layers))

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> LayerMemory:
        tokens = self.embed.context(xc, yc)
        latents = self.latents.expand(tokens.shape[0], -1, -1)
        found = []
        for distil, mix, read_out in zip(self.distil, self.mix, self.read_out, strict=True):
            latents = distil(latents, tokens, mask)
            latents = mix(latents, latents)
            found.append(KeyValues(*read_out.key_values(latents)))
        return LayerMemory(tuple(found))

    def _answer(self, memory: LayerMemory, xt: Targets) -> Distribution:
        query = self.embed.query(xt)
        for read_out, latents in zip(self.read_out, memory.layers, strict=True):
            query = read_out.read(query, latents.keys, latents.values)
        return self.head(query)
