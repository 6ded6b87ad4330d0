"""Encoders of the neural processes: how a set of points becomes a vector, or one vector per target.

Both have two steps: `build` prepares a context, `read` gives features for any number of targets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.nn.blocks import MLP
from retreever.ops.attention.api import attention
from retreever.ops.backend import Impl

X = Float[Tensor, "b n dx"]
Y = Float[Tensor, "b n dy"]
Mask = Bool[Tensor, "b n"] | None
Prepared = tuple[Float[Tensor, "b n h e"], Float[Tensor, "b n h e"], Mask]


class AttentiveLayer(nn.Module):
    """Attention of the attentive neural processes: norms come after, and the residual is the projected query."""

    def __init__(self, dim: int, heads: int, impl: Impl = "auto") -> None:
        super().__init__()
        self.heads = heads
        self.impl: Impl = impl
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def key_values(self, keys: Float[Tensor, "b n d"], values: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor]:
        """Projected heads of tokens to attend to."""
        return self._heads(self.to_k(keys)), self._heads(self.to_v(values))

    def forward(
        self, query: Float[Tensor, "b m d"], keys: Tensor, values: Tensor, mask: Mask = None
    ) -> Float[Tensor, "b m d"]:
        projected = self.to_q(query)
        q = self._heads(projected) * self.heads**-0.5  # scores are divided by the root of dim, not of a head's width
        attended = attention(q, keys, values, mask, 0.0, self.impl)
        out = self.norm(projected + attended.flatten(-2))
        return self.out_norm(out + F.relu(self.to_out(out)))

    def among(self, tokens: Float[Tensor, "b n d"], mask: Mask = None) -> Float[Tensor, "b n d"]:
        """Self-attention."""
        return self(tokens, *self.key_values(tokens, tokens), mask)

    def _heads(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n h e"]:
        return torch.unflatten(tokens, -1, (self.heads, -1))


class PoolingEncoder(nn.Module):
    """A vector for a whole set: a net per point, the mean over points, another net.

    Args:
        width: of a point, dim_x + dim_y.
        dim: of all layers.
        out: width of the result.
        pre: layers before the mean.
        post: layers after it.
        attention: takes the place of the last two layers before the mean.
    """

    def __init__(
        self, width: int, dim: int, out: int, pre: int, post: int, attention: AttentiveLayer | None = None
    ) -> None:
        super().__init__()
        self.before = MLP(width, dim, dim, pre if attention is None else pre - 2)
        self.attention = attention
        self.after = MLP(dim, dim, out, post)

    def build(self, x: X, y: Y, mask: Mask = None) -> Float[Tensor, "b out"]:
        """The vector of every set."""
        points = self.before(torch.cat([x, y], dim=-1))
        if self.attention is not None:
            points = self.attention.among(F.relu(points), mask)
        if mask is None:
            return self.after(points.mean(dim=1))
        count = mask.sum(dim=1, keepdim=True).clamp_min(1)
        return self.after(points.masked_fill(~mask[..., None], 0).sum(dim=1) / count)

    def read(self, built: Float[Tensor, "b out"], xt: Float[Tensor, "b m dx"]) -> Float[Tensor, "b m out"]:
        """The same vector for every target."""
        return built[:, None].expand(-1, xt.shape[1], -1)


class CrossAttentionEncoder(nn.Module):
    """A vector per target: attention from its place to the places of the context, over self-attended points.

    Args:
        dim_x: coordinates per point.
        dim_y: values per point.
        dim: of all layers.
        values: layers of a point, the last two replaced by self-attention.
        keys: layers of a place.
        layers: the self-attention and the attention from targets.
    """

    def __init__(
        self, dim_x: int, dim_y: int, dim: int, values: int, keys: int, layers: tuple[AttentiveLayer, AttentiveLayer]
    ) -> None:
        super().__init__()
        self.places = MLP(dim_x, dim, dim, keys)
        self.points = MLP(dim_x + dim_y, dim, dim, values - 2)
        self.mix, self.attention = layers

    def build(self, x: X, y: Y, mask: Mask = None) -> Prepared:
        """Keys and values of the context, and its mask."""
        points = self.mix.among(self.points(torch.cat([x, y], dim=-1)), mask)
        return *self.attention.key_values(self.places(x), points), mask

    def read(self, built: Prepared, xt: Float[Tensor, "b m dx"]) -> Float[Tensor, "b m d"]:
        """Features of every target."""
        return self.attention(self.places(xt), *built)
