"""Feed-forward layers and the residual attention block that both cross attentions and all encoders use."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int, check_number, reject
from retreever.ops.attention.api import attention
from retreever.ops.backend import IMPLS, Impl

Residual = Literal["pre", "normalised", "doubled", "none"]
RESIDUALS: tuple[Residual, ...] = get_args(Residual)
ContextNorm = Literal["none", "shared", "own"]
CONTEXT_NORMS: tuple[ContextNorm, ...] = get_args(ContextNorm)


class MLP(nn.Sequential):
    """`depth` linear layers with an activation between them, for coordinates, values and predictions.

    Runs in full precision under autocast, since coordinates and values need all their digits.
    """

    def __init__(
        self, width_in: int, hidden: int, width_out: int, depth: int, activation: type[nn.Module] = nn.ReLU
    ) -> None:
        widths = [width_in, *[hidden] * (depth - 1), width_out]
        layers: list[nn.Module] = []
        for left, right in pairwise(widths):
            layers += [nn.Linear(left, right), activation()]
        super().__init__(*layers[:-1])

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())  # type: ignore[no-untyped-call]


class FeedForward(nn.Module):
    """Gated feed-forward (GEGLU): half of the hidden layer gates the other half."""

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(value * F.gelu(gate)))


class AttentionBlock(nn.Module):
    """Norm, multi-head attention, residual, feed-forward. Callers may replace the attention.

    `start` returns the query heads, `key_values` the keys and values of tokens, and `finish` turns attended values into
    the output of the block; `forward` runs all three, with attention over all tokens in between.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim`.
        kdim: width of the context; None means `dim`.
        hidden: width of the feed-forward layer; 0 leaves it out.
        residual: "pre" is x + f(LN x). "normalised" is LN x + f(LN x), as in the paper's code; "doubled" also adds the
            raw query, as in its tree attention. "none" has neither norm nor residual: bare
            multi-head attention.
        context_norm: normalise the context with a norm of its "own", the query's ("shared", for self-attention) or
            "none".
        dropout: on the feed-forward output and on the attention weights.
        bias: of the query, key and value projections.
        impl: backend of the attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kdim: int | None = None,
        hidden: int = 0,
        residual: Residual = "pre",
        context_norm: ContextNorm = "none",
        dropout: float = 0.0,
        bias: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_int("dim", dim, 1)
        check_int("heads", heads, 1)
        if dim % heads:
            reject("heads", f"a divisor of dim={dim}", heads)
        if kdim is not None:
            check_int("kdim", kdim, 1)
        check_int("hidden", hidden, 0)
        check_choice("residual", residual, RESIDUALS)
        check_choice("context_norm", context_norm, CONTEXT_NORMS)
        check_number("dropout", dropout, below=1.0)
        check_choice("impl", impl, IMPLS)
        self.dim, self.kdim = dim, dim if kdim is None else kdim
        self.heads, self.width = heads, dim // heads
        self.residual: Residual = residual
        self.dropout = dropout
        self.impl: Impl = impl
        self.norm = nn.Identity() if residual == "none" else nn.LayerNorm(dim)
        self.context_norm = nn.LayerNorm(self.kdim) if context_norm == "own" else None
        self.shared_norm = context_norm == "shared"
        self.to_q = nn.Linear(dim, dim, bias=bias)
        self.to_kv = nn.Linear(self.kdim, 2 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim)
        self.feed_norm = nn.LayerNorm(dim) if hidden and residual != "none" else nn.Identity()
        self.feed_forward = FeedForward(dim, hidden, dropout) if hidden else None

    def start(self, query: Float[Tensor, "b m d"]) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b m h e"]]:
        """The normalised query and its heads."""
        normed = self.norm(query)
        return normed, self.to_q(normed).unflatten(-1, (self.heads, self.width))

    def key_values(self, context: Float[Tensor, "b t c"]) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]]:
        """Keys and values of `context`: two halves of one tensor, so a node's key and value lie side by side."""
        if self.shared_norm:
            context = self.norm(context)
        elif self.context_norm is not None:
            context = self.context_norm(context)
        return self.split_heads(self.to_kv(context))

    def finish(
        self, query: Float[Tensor, "b m d"], normed: Float[Tensor, "b m d"], attended: Float[Tensor, "b m h e"]
    ) -> Float[Tensor, "b m d"]:
        """Output projection, residual and feed-forward."""
        out = self.to_out(attended.flatten(-2))
        if self.residual == "pre":
            out = query + out
        elif self.residual == "normalised":
            out = normed + out
        elif self.residual == "doubled":
            out = query + normed + out
        if self.feed_forward is None:
            return out
        fed = self.feed_norm(out)
        delta = self.feed_forward(fed)
        if self.residual == "none":
            return delta
        return (out if self.residual == "pre" else fed) + delta

    def attend(
        self,
        q: Float[Tensor, "b m h e"],
        keys: Float[Tensor, "b n h e"],
        values: Float[Tensor, "b n h e"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m h e"]:
        """Attention over all tokens that `mask` calls real."""
        return attention(q, keys, values, mask, self.dropout if self.training else 0.0, self.impl)

    def read(
        self,
        query: Float[Tensor, "b m d"],
        keys: Float[Tensor, "b n h e"],
        values: Float[Tensor, "b n h e"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """The whole block, with keys and values prepared by `key_values`."""
        normed, q = self.start(query)
        return self.finish(query, normed, self.attend(q, keys, values, mask))

    def forward(
        self,
        query: Float[Tensor, "b m d"],
        context: Float[Tensor, "b n c"],
        mask: Bool[Tensor, "b n"] | None = None,
        mixer: Float[Tensor, "2 r n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """The whole block, with attention from `query` to `context`, or to mixtures of its tokens by `mixer`."""
        normed, q = self.start(query)
        if self.shared_norm and query is context:
            keys, values = self.split_heads(self.to_kv(normed))  # the same norm of the same tokens
        else:
            keys, values = self.key_values(context)
        if mixer is not None:
            keys, values = (_mix(part, weight, mask) for part, weight in zip((keys, values), mixer, strict=True))
            mask = None
        return self.finish(query, normed, self.attend(q, keys, values, mask))

    def split_heads(self, both: Float[Tensor, "b t c"]) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]]:
        """Keys and values that lie side by side, by heads."""
        keys, values = both.view(*both.shape[:-1], 2, self.heads, self.width).unbind(dim=-3)
        return keys, values


def _mix(
    part: Float[Tensor, "b n h e"], weight: Float[Tensor, "r n"], mask: Bool[Tensor, "b n"] | None
) -> Float[Tensor, "b r h e"]:
    """Mixtures of keys or values over the real tokens."""
    real = part if mask is None else part.masked_fill(~mask[..., None, None], 0)
    return torch.einsum("rn,bnhe->brhe", weight, real)


def self_attention_block(
    dim: int, heads: int, hidden: int, residual: Residual, dropout: float, impl: Impl = "auto"
) -> AttentionBlock:
    """One transformer layer. Unless `residual` is "pre", keys and values come from the raw input."""
    return AttentionBlock(
        dim,
        heads,
        hidden=hidden,
        residual=residual,
        context_norm="shared" if residual == "pre" else "none",
        dropout=dropout,
        impl=impl,
    )
