"""Base of the six neural processes CNP, CANP, NP, ANP, BNP and BANP: settings, encoders, decoder.

A context is read by one or two encoders, a pooled vector or attention from every target; the decoder takes what they
give for a target, and the target's place. All are trained to predict the context points, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int, reject
from retreever.batch import Batch
from retreever.models.base import Contexts, Mask, Model, Values
from retreever.models.config import AnyConfig, resolve
from retreever.nn.heads import AnyHead, Head, make_head
from retreever.nn.neural_process import AttentiveLayer, CrossAttentionEncoder, PoolingEncoder

DEPTHS = ("pre_depth", "post_depth", "value_depth", "key_depth", "decoder_depth")


@dataclass(frozen=True)
class NPConfig(AnyConfig):
    """Settings of the neural processes; the defaults are the published sizes of GP regression.

    Attributes:
        pre_depth: layers of a point before the mean over points.
        post_depth: layers after the mean.
        value_depth: layers of a point whose values are attended to.
        key_depth: layers of a place.
        decoder_depth: layers of the decoder.
        samples: latents or bootstraps per context in training.
    """

    dim: int = 128
    heads: int = 8
    head: Head = "floored"
    pre_depth: int = 4
    post_depth: int = 2
    value_depth: int = 4
    key_depth: int = 2
    decoder_depth: int = 3
    samples: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.points_only()
        check_choice("head", self.head, ("floored", "gaussian", "bounded"))
        if self.out != self.dim_y:
            reject("outputs", f"dim_y={self.dim_y}, since context points are predicted, too", self.outputs)
        if self.dim % self.heads:
            reject("heads", f"a divisor of dim={self.dim}", self.heads)
        for name in DEPTHS:
            check_int(name, getattr(self, name), 3 if name in ("pre_depth", "value_depth") else 1)
        check_int("samples", self.samples, 1)


@dataclass(frozen=True)
class Encoded:
    """A context as the encoders of a neural process prepared it.

    Attributes:
        parts: what each encoder built.
        rows: number of contexts.
        latents: sampled latents, (samples, b, d).
        bootstraps: what each encoder built of the bootstrapped contexts, samples * b rows.
    """

    parts: tuple[Any, ...]
    rows: int
    latents: Float[Tensor, "k b d"] | None = None
    bootstraps: tuple[Any, ...] = ()


class NeuralProcess(Model):
    """Settings and parts that the six share; subclasses say which encoders they have."""

    config: NPConfig
    memory = Encoded
    attentive: ClassVar[bool] = False  # attention in place of means

    def __init__(self, config: NPConfig | None, fields: dict[str, Any]) -> None:
        super().__init__()
        self.config = resolve(NPConfig, config, fields)

    def tokens(self, n: int) -> int:
        """All `n` with attention, else the pooled vector alone."""
        return n if self.attentive else 1

    def _layer(self) -> AttentiveLayer:
        return AttentiveLayer(self.config.dim, self.config.heads, self.config.impl)

    def _pooling(self, out: int) -> PoolingEncoder:
        """A pooling encoder, with self-attention in attentive models."""
        c = self.config
        layer = self._layer() if self.attentive else None
        return PoolingEncoder(c.dim_x + c.dim_y, c.dim, out, c.pre_depth, c.post_depth, layer)

    def _deterministic(self) -> PoolingEncoder | CrossAttentionEncoder:
        """The encoder that gives every target a vector: attention in attentive models, else pooling."""
        c = self.config
        if not self.attentive:
            return self._pooling(c.dim)
        layers = (self._layer(), self._layer())
        return CrossAttentionEncoder(c.dim_x, c.dim_y, c.dim, c.value_depth, c.key_depth, layers)

    def _decoder(self, width: int) -> AnyHead:
        """The head, for inputs of `width` and a place."""
        c = self.config
        return make_head(c.head, width + c.dim_x, c.dim, c.out, depth=c.decoder_depth)


def build(encoders: Iterable[Any], x: Contexts, y: Values, mask: Mask) -> tuple[Any, ...]:
    """What each encoder prepares of a context."""
    return tuple(encoder.build(x, y, mask) for encoder in encoders)


def read(encoders: nn.ModuleList, parts: tuple[Any, ...], xt: Float[Tensor, "b m dx"]) -> Float[Tensor, "b m d"]:
    """Features of every target, all encoders side by side."""
    pairs: Iterable[tuple[Any, Any]] = zip(encoders, parts, strict=True)
    return torch.cat([encoder.read(part, xt) for encoder, part in pairs], dim=-1)


def all_points(batch: Batch) -> tuple[Contexts, Values, Mask]:
    """Context and target points as one set; unknown outputs of targets are NaN."""
    x, y = torch.cat([batch.xc, batch.xt], dim=1), torch.cat([batch.yc, batch.yt], dim=1)
    if batch.context_mask is None and batch.target_mask is None:
        return x, y, None
    masks = (_mask(batch.context_mask, batch.xc), _mask(batch.target_mask, batch.xt))
    return x, y, torch.cat(masks, dim=1)


def _mask(mask: Mask, x: Contexts) -> Bool[Tensor, "b n"]:
    return torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
