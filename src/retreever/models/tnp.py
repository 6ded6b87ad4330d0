"""TNP-D (Nguyen and Grover, 2022): a transformer over context and targets in which all attend to the context alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_int
from retreever.models.base import Contexts, Mask, Model, Targets, Values
from retreever.models.config import AnyConfig, resolve
from retreever.nn.blocks import MLP
from retreever.nn.heads import make_head
from retreever.nn.transformer import PostNormLayer
from retreever.results import KeyValues, LayerMemory


@dataclass(frozen=True)
class TNPDConfig(AnyConfig):
    """Settings of TNP-D.

    Attributes:
        layers: transformer layers.
        hidden: width of feed-forward layers and of the head.
        embed_depth: layers of the embedding.
    """

    layers: int = 6
    hidden: int = 128
    embed_depth: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.points_only()
        for name in ("layers", "hidden", "embed_depth"):
            check_int(name, getattr(self, name), 1)


class TNPD(Model):
    """Transformer neural process with independent targets: a target is a token (x, 0) that no token attends to."""

    config: TNPDConfig
    memory = LayerMemory

    def __init__(self, config: TNPDConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(TNPDConfig, config, fields)
        c = self.config
        self.embed_point = MLP(c.dim_x + c.dim_y, c.dim, c.dim, c.embed_depth)
        self.layers: Any = nn.ModuleList(PostNormLayer(c.dim, c.heads, c.hidden, c.impl) for _ in range(c.layers))
        self.head = make_head(c.head, c.dim, c.hidden, c.out)

    def tokens(self, n: int) -> int:
        """All `n` context tokens."""
        return n

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> LayerMemory:
        tokens = self.embed_point(torch.cat([xc, yc], dim=-1))
        found = []
        for layer in self.layers:
            keys, values = layer.key_values(tokens)
            found.append(KeyValues(keys, values, mask))
            if layer is not self.layers[-1]:  # nobody reads the context after the last layer
                tokens = layer(tokens, keys, values, mask)
        return LayerMemory(tuple(found))

    def _answer(self, memory: LayerMemory, xt: Targets) -> Distribution:
        tokens = self.embed_point(self._blank(xt))
        for layer, given in zip(self.layers, memory.layers, strict=True):
            tokens = layer(tokens, given.keys, given.values, given.mask)
        return self.head(tokens)

    def _predict(self, xc: Contexts, yc: Values, mask: Mask, xt: Targets) -> Distribution:
        """Context and targets in one pass."""
        n = xc.shape[1]
        tokens = self.embed_point(torch.cat([torch.cat([xc, yc], dim=-1), self._blank(xt)], dim=1))
        for layer in self.layers:
            tokens = layer(tokens, *layer.key_values(tokens[:, :n]), mask)
        return self.head(tokens[:, n:])

    def _blank(self, xt: Targets) -> Float[Tensor, "b m dxy"]:
        """Targets as points whose values are 0."""
        return torch.cat([xt, xt.new_zeros(*xt.shape[:2], self.config.dim_y)], dim=-1)
