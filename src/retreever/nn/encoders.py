"""Encoders (b, n, d) -> (b, n, d) of the context; ReTreever takes any of them (paper, section 3.4).

All take a mask and give the same result for a context alone and for the same context padded inside a batch, provided
real tokens come first, as the models order them. Linformer and ChordMixer depend on positions: pass leaf order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int, reject
from retreever.nn.blocks import MLP, AttentionBlock, Residual, self_attention_block
from retreever.ops.backend import Impl

Encoder = Literal["identity", "transformer", "linformer", "chordmixer"]
ENCODERS: tuple[Encoder, ...] = ("identity", "transformer", "linformer", "chordmixer")
Tokens = Float[Tensor, "b n d"]
Mask = Bool[Tensor, "b n"] | None


class IdentityEncoder(nn.Module):
    """No encoder: the copy task of the paper reads its embeddings directly."""

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        return tokens


class TransformerEncoder(nn.Module):
    """Self-attention layers."""

    def __init__(self, layers: Iterable[AttentionBlock]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        for layer in self.layers:
            tokens = layer(tokens, tokens, mask)
        return tokens


class LinformerEncoder(nn.Module):
    """Self-attention to `rank` learned mixtures of the sequence: O(n) time (Linformer, headwise sharing)."""

    def __init__(self, layers: Iterable[AttentionBlock], max_tokens: int, rank: int = 32) -> None:
        super().__init__()
        check_int("max_tokens", max_tokens, 1)
        self.max_tokens = max_tokens
        self.layers = nn.ModuleList(layers)
        bound = rank**-0.5
        self.mixers = nn.ParameterList(
            nn.Parameter(torch.empty(2, rank, max_tokens).uniform_(-bound, bound)) for _ in self.layers
        )

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        n = tokens.shape[1]
        if n > self.max_tokens:
            reject("tokens", f"at most max_tokens={self.max_tokens} tokens", n)
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            tokens = layer(tokens, tokens, mask, mixer[:, :, :n])
        return tokens


class ChordMixerEncoder(nn.Module):
    """Blocks of a token-wise MLP followed by a roll of each track by a power of two: O(n log n), no attention.

    Rolls wrap at every sequence's own length. All blocks are applied whatever the length, so rows of a padded batch
    give the same result as alone.
    """

    def __init__(self, dim: int, hidden: int, dropout: float, max_tokens: int) -> None:
        super().__init__()
        check_int("max_tokens", max_tokens, 1)
        self.max_tokens = max_tokens
        blocks = max(1, math.ceil(math.log2(max_tokens)))
        self.tracks = blocks + 1
        width = self.tracks * math.ceil(dim / self.tracks)
        self.into = nn.Linear(dim, width) if width != dim else nn.Identity()
        self.back = nn.Linear(width, dim) if width != dim else nn.Identity()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.mlps = nn.ModuleList(MLP(width, hidden, width, 2, nn.GELU) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        b, n, _ = tokens.shape
        if n > self.max_tokens:
            reject("tokens", f"at most max_tokens={self.max_tokens} tokens", n)
        position = torch.arange(n, device=tokens.device)
        length = torch.full((b,), n, device=tokens.device) if mask is None else mask.sum(dim=1)
        shift = torch.tensor([0, *(2**i for i in range(self.tracks - 1))], device=tokens.device)
        # Track i of position p comes from position p + 2^(i-1), modulo the length of the sequence.
        source = (position[None, :, None] + shift) % length.clamp_min(1)[:, None, None]  # (b, n, tracks)
        x = self.into(tokens)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            mixed = self.dropout(mlp(norm(x))).unflatten(-1, (self.tracks, -1))
            x = x + mixed.gather(1, source[..., None].expand_as(mixed)).flatten(-2)
        return self.back(x)


def make_encoder(
    encoder: Encoder,
    dim: int,
    heads: int,
    layers: int,
    hidden: int,
    residual: Residual,
    dropout: float,
    max_tokens: int,
    impl: Impl = "auto",
) -> nn.Module:
    """The encoder of that name."""
    check_choice("encoder", encoder, ENCODERS)
    check_int("layers", layers, 0)
    blocks = (self_attention_block(dim, heads, hidden, residual, dropout, impl) for _ in range(layers))
    if encoder == "transformer":
        return TransformerEncoder(blocks)
    if encoder == "linformer":
        return LinformerEncoder(blocks, max_tokens)
    if encoder == "chordmixer":
        return ChordMixerEncoder(dim, hidden, dropout, max_tokens)
    return IdentityEncoder()
