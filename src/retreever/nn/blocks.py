"""Attention, feed-forward and the residual block both cross attentions and all encoders are made of."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int, check_number, reject
from retreever.nn.cpu_block import block_fits, finish_rows
from retreever.nn.dropout import Dropout, drop
from retreever.nn.fused_attention import attention
from retreever.nn.fused_block import finish_fused, fits, project_fused
from retreever.nn.geglu import geglu
from retreever.nn.layer_norm import LayerNorm
from retreever.nn.relu_layers import layers_fit, relu_layers
from retreever.nn.triton_here import triton_installed

Residual = Literal["pre", "normalised", "doubled", "none"]
RESIDUALS: tuple[Residual, ...] = ("pre", "normalised", "doubled", "none")
ContextNorm = Literal["none", "shared", "own"]
CONTEXT_NORMS: tuple[ContextNorm, ...] = ("none", "shared", "own")


# Up to this many query-key pairs per row, sums of products beat an attention kernel made for long sequences.
FEW = 16


class MLP(nn.Sequential):
    """`depth` linear layers with an activation between them, for coordinates, values and predictions.

    Those need all their digits: under autocast it stays in full precision. `fused = False` leaves gradients to torch.
    """

    fused = True

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
            if self.fused and self.training and layers_fit(x, layers := list(self)):
                return relu_layers(x, layers)
            return super().forward(x)  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())  # type: ignore[no-untyped-call]


class FeedForward(nn.Module):
    """Gated feed-forward (GEGLU): half of the hidden layer gates the other half.

    `fused = False` leaves all gradients to torch.
    """

    fused = True

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        up = self.up(x)
        wanted = up.requires_grad and (self.training or not up.is_cpu)
        if self.fused and wanted and not torch.compiler.is_compiling():
            gated = geglu(up)
        else:
            value, gate = up.chunk(2, dim=-1)
            gated = value * F.gelu(gate)
        return self.dropout(self.down(gated))


class AttentionBlock(nn.Module):
    """Norm, multi-head attention, residual, feed-forward. Attention itself may be done elsewhere.

    `start` gives the query heads, `key_values` the keys and values of any tokens, `finish` turns attended values into
    the block's output; `forward` does all three with plain attention between.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim`.
        kdim: width of the context; None means `dim`.
        hidden: width of the feed-forward layer; 0 leaves it out.
        residual: "pre" is x + f(LN x). "normalised" is LN x + f(LN x), the form of the paper's code, and "doubled" adds
            the raw query once more, as its tree attention does. "none" has neither norm nor residual: bare
            multi-head attention.
        context_norm: normalise the context with a norm of its "own", the query's ("shared", for self-attention) or
            "none".
        dropout: on the feed-forward output and on the weights of plain attention.
        bias: of the query, key and value projections.
    """

    fused = True  # on CUDA; False leaves gradients to torch

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
    ) -> None:
        super().__init__()
        _check_block(dim, heads, kdim, hidden, residual, context_norm, dropout)
        kdim = dim if kdim is None else kdim
        self.heads, self.width, self.residual, self.dropout = heads, dim // heads, residual, dropout
        self.norm = nn.Identity() if residual == "none" else LayerNorm(dim)
        self.context_norm = LayerNorm(kdim) if context_norm == "own" else None
        self.shared_norm = context_norm == "shared"
        self.to_q = nn.Linear(dim, dim, bias=bias)
        self.to_kv = nn.Linear(kdim, 2 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim)
        self.feed_norm = LayerNorm(dim) if hidden and residual != "none" else nn.Identity()
        self.feed_forward = FeedForward(dim, hidden, dropout) if hidden else None

    def start(self, query: Float[Tensor, "b m d"]) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b m h e"]]:
        """The normalised query and its heads."""
        normed = self.norm(query)
        return normed, self.to_q(normed).unflatten(-1, (self.heads, self.width))

    def key_values(self, context: Float[Tensor, "b t c"]) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]]:
        """Keys and values of `context`: two halves of one tensor, so a node's key and value lie side by side."""
        norm = self.norm if self.shared_norm else self.context_norm
        both = norm_linear(context, norm, self.to_kv)
        keys, values = both.view(*both.shape[:-1], 2, self.heads, self.width).unbind(dim=-3)
        return keys, values

    def finish(
        self, query: Float[Tensor, "b m d"], normed: Float[Tensor, "b m d"], attended: Float[Tensor, "b m h e"]
    ) -> Float[Tensor, "b m d"]:
        """Output projection, residual and feed-forward."""
        if fits(self, query) or block_fits(self, query):
            residual = {"pre": query, "normalised": normed}.get(self.residual)
            finish = finish_fused if query.is_cuda else finish_rows
            return finish(self, query + normed if residual is None else residual, attended)
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
        """Plain attention over all tokens that `mask` calls real."""
        dropout = self.dropout if self.training else 0.0
        if q.shape[1] * keys.shape[1] <= FEW:
            return attend_few(q, keys, values, mask, dropout)
        return attention(q, keys, values, mask, dropout)

    def forward(
        self,
        query: Float[Tensor, "b m d"],
        context: Float[Tensor, "b n c"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """The whole block with plain attention from `query` to `context`."""
        if query is context and self.context_norm is None and self.to_q.bias is None and fits(self, query):
            normed, q, keys, values = project_fused(self, query)
        else:
            normed, q = self.start(query)
            keys, values = self.key_values(context)
        return self.finish(query, normed, self.attend(q, keys, values, mask))


def norm_linear(x: Float[Tensor, "*b d"], norm: nn.Module | None, linear: nn.Linear) -> Float[Tensor, "*b out"]:
    """linear(norm(x)); one kernel where no gradient is asked for on CUDA."""
    if norm is None:
        return linear(x)
    quick = x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if quick and isinstance(norm, nn.LayerNorm) and triton_installed():
        from retreever.nn.norm_linear_kernel import fits, norm_linear_fused

        if fits(x, linear):
            return norm_linear_fused(x, norm, linear)
    return linear(norm(x))


def attend_few(
    q: Float[Tensor, "g m h e"],
    keys: Float[Tensor, "g n h e"],
    values: Float[Tensor, "g n h e"],
    mask: Bool[Tensor, "g n"] | None,
    dropout: float,
) -> Float[Tensor, "g m h e"]:
    """Attention of a few queries to a few tokens, for very many groups at once."""
    scores = (q[:, :, None] * keys[:, None]).sum(dim=-1) * q.shape[-1] ** -0.5  # (g, m, n, h)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, :, None], -math.inf)
    weights = drop(scores.softmax(dim=2), dropout)
    return (weights[..., None] * values[:, None]).sum(dim=2)


def self_attention_block(dim: int, heads: int, hidden: int, residual: Residual, dropout: float) -> AttentionBlock:
    """One transformer layer. With the paper code's residual, keys and values come from the raw input."""
    return AttentionBlock(
        dim,
        heads,
        hidden=hidden,
        residual=residual,
        context_norm="shared" if residual == "pre" else "none",
        dropout=dropout,
    )


def _check_block(
    dim: int, heads: int, kdim: int | None, hidden: int, residual: str, context_norm: str, dropout: float
) -> None:
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
