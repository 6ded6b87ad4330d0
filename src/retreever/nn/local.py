"""Self-attention within windows: O(n) time and memory, and what comes later never changes what was encoded.

Every token attends to itself and to the window - 1 tokens before it in leaf order. So a context can grow: new tokens
need only what each layer got for the last tokens, which `LocalState` keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retreever.arguments import check_int
from retreever.nn.blocks import AttentionBlock

Tokens = Float[Tensor, "b n d"]
PIECE = 16_384  # tokens that a layer works on at a time: activations stay small, however long the context


class LocalState(NamedTuple):
    """What is needed to encode further tokens: the input of every layer for the last `window` tokens of each row.

    `seen` says how many of them there are; the others, on the left, hold zeros.
    """

    inputs: Float[Tensor, "b layers w d"]
    seen: Int[Tensor, " b"]


class LocalEncoder(nn.Module):
    """Self-attention layers in which a token sees itself and the `window` - 1 tokens before it."""

    def __init__(self, layers: Iterable[AttentionBlock], window: int = 64) -> None:
        super().__init__()
        check_int("window", window, 1)
        self.layers, self.window = nn.ModuleList(layers), window

    def forward(self, tokens: Tokens, mask: Bool[Tensor, "b n"] | None = None) -> Tokens:
        """Real tokens come first, so that none sees padding: it is never before them."""
        return self.extend(tokens, self.start(tokens))[0]

    def start(self, like: Tokens) -> LocalState:
        """The state before the first token."""
        b, _, d = like.shape
        nothing = torch.zeros(b, dtype=torch.int64, device=like.device)
        return LocalState(like.new_zeros(b, len(self.layers), self.window, d), nothing)

    def extend(
        self, tokens: Tokens, state: LocalState, lengths: Int[Tensor, " b"] | None = None
    ) -> tuple[Tokens, LocalState]:
        """Encode `tokens` that follow those of `state`, `lengths` of them in each row (None: all); and the new state.

        The result is that of encoding all tokens at once.
        """
        b, n, _ = tokens.shape
        lengths = torch.full((b,), n, device=tokens.device) if lengths is None else lengths
        last = (lengths[:, None] + torch.arange(self.window, device=tokens.device))[..., None]
        kept = []
        for index, layer in enumerate(self.layers):
            context = torch.cat([state.inputs[:, index], tokens], dim=1)
            kept.append(context.gather(1, last.expand(-1, -1, context.shape[2])))
            step = max(self.window, PIECE // b)
            pieces = [self._layer(layer, context, state.seen, i, min(n, i + step)) for i in range(0, n, step)]
            tokens = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        inputs = torch.stack(kept, dim=1) if kept else state.inputs
        return tokens, LocalState(inputs, (state.seen + lengths).clamp_max(self.window))

    def _layer(
        self, layer: nn.Module, context: Float[Tensor, "b wide d"], seen: Int[Tensor, " b"], start: int, stop: int
    ) -> Tokens:
        """One layer for tokens `start` to `stop`; `context` has `window` places more, in front of token 0."""
        assert isinstance(layer, AttentionBlock)
        window, size = self.window, min(self.window, stop - start)  # queries that share a window of keys
        spare = -(stop - start) % size
        query = context[:, window + start : window + stop]
        normed, q = layer.start(query)
        pair = layer.key_values(context[:, start : window + stop])
        q, keys, values = (F.pad(part, (0, 0, 0, 0, 0, spare)) for part in (q, *pair))
        mask = self._visible(seen, start, size, (stop - start + spare) // size)
        dropout = layer.dropout if layer.training else 0.0
        attended = _windows(q, keys, values, mask, size, window, dropout)
        return layer.finish(query, normed, attended[:, : stop - start])

    def _visible(self, seen: Int[Tensor, " b"], start: int, size: int, groups: int) -> Bool[Tensor, "b g q k"]:
        """Which of `size` + window keys each query of a group sees: the window up to itself, where there are tokens."""
        key, query = (torch.arange(length, device=seen.device) for length in (size + self.window, size))
        near = (key > query[:, None]) & (key <= query[:, None] + self.window)
        place = start - self.window + size * torch.arange(groups, device=seen.device)[:, None] + key
        return near & (place >= -seen[:, None, None])[:, :, None]


def _windows(
    q: Float[Tensor, "b n h e"],
    keys: Float[Tensor, "b n1 h e"],
    values: Float[Tensor, "b n1 h e"],
    mask: Bool[Tensor, "b g q k"],
    size: int,
    window: int,
    dropout: float,
) -> Float[Tensor, "b n h e"]:
    """Attention of groups of `size` queries, each to its own `size` + `window` keys."""
    b, n, h, e = q.shape
    groups = q.reshape(b * (n // size), size, h, e).transpose(1, 2)  # (b g, h, q, e)
    near, read = (part.unfold(1, size + window, size).flatten(0, 1).transpose(2, 3) for part in (keys, values))
    found = F.scaled_dot_product_attention(groups, near, read, mask.flatten(0, 1)[:, None], dropout)
    return found.transpose(1, 2).reshape(q.shape)
