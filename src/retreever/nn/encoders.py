"""Encoders (b, n, d) -> (b, n, d) of the context; ReTreever takes any of them (paper, section 3.4).

All take a mask and give the same result for a context alone and for the same context padded inside a batch, provided
real tokens come first, as the models order them. All but the transformer depend on positions: pass leaf order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from time import perf_counter
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_choice, check_int, reject
from retreever.checks import values_readable
from retreever.nn.blocks import MLP, AttentionBlock, Residual, self_attention_block
from retreever.nn.local import LocalEncoder
from retreever.ops.backend import Impl

Encoder = Literal["identity", "transformer", "local", "linformer", "chordmixer"]
ENCODERS: tuple[Encoder, ...] = get_args(Encoder)
Tokens = Float[Tensor, "b n d"]
Mask = Bool[Tensor, "b n"] | None
LONG, SAMPLE = 16_384, 2_048  # tokens from which a transformer is timed first, on a sample
SLOW = 10.0  # seconds that deserve a warning


def encode_tokens(encoder: nn.Module, tokens: Tokens, mask: Mask) -> Tokens:
    """What `encoder` makes of the tokens, which may be anybody's module: as many, of the same width."""
    found: object = encoder(tokens, mask)
    if not isinstance(found, Tensor) or found.shape != tokens.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        reject("encoder", f"one that returns tokens of the shape it gets, {tuple(tokens.shape)}", got)
    return found


class IdentityEncoder(nn.Module):
    """No encoder: the copy task of the paper reads its embeddings directly."""

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        return tokens


class TransformerEncoder(nn.Module):
    """Self-attention layers: O(n^2) time, so that long contexts get a warning with an estimate first."""

    def __init__(self, layers: Iterable[AttentionBlock]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tokens, mask: Mask = None) -> Tokens:
        if tokens.shape[1] >= LONG and self.layers and values_readable(tokens):
            _warn_if_slow(self.layers[0], len(self.layers), tokens)
        for layer in self.layers:
            tokens = layer(tokens, tokens, mask)
        return tokens


@torch.no_grad()
def _warn_if_slow(layer: nn.Module, layers: int, tokens: Tokens) -> None:
    """Time one layer on the first tokens, and warn if all layers on all tokens will take long."""
    n, sample = tokens.shape[1], tokens[:1, :SAMPLE]
    layer(sample, sample)  # the first call allocates and compiles
    seconds = []
    for size in (SAMPLE // 2, SAMPLE):
        started = perf_counter()
        float(layer(sample[:, :size], sample[:, :size])[0, 0, 0])  # waits for an accelerator
        seconds.append(perf_counter() - started)
    square = max(seconds[1] - 2 * seconds[0], seconds[1] / 4) / (SAMPLE**2 / 2)  # the rest grows like n
    estimate = layers * tokens.shape[0] * square * n**2
    if estimate > SLOW:
        warnings.warn(
            f"encoder='transformer' takes O(n^2) time: about {_readable(estimate)} for {n:,} tokens here; "
            f"encoder='local' (windows of neighbours) and 'identity' take O(n)",
            stacklevel=2,
        )


def _readable(seconds: float) -> str:
    units = (("s", 1), ("min", 60), ("hours", 3600), ("days", 86400))
    name, size = next((unit for unit in reversed(units) if seconds >= 2 * unit[1]), units[0])
    return f"{seconds / size:,.0f} {name}"


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
    window: int = 64,
) -> nn.Module:
    """The encoder of that name."""
    check_choice("encoder", encoder, ENCODERS)
    check_int("layers", layers, 0)
    blocks = (self_attention_block(dim, heads, hidden, residual, dropout, impl) for _ in range(layers))
    if encoder == "transformer":
        return TransformerEncoder(blocks)
    if encoder == "local":
        return LocalEncoder(blocks, window)
    if encoder == "linformer":
        return LinformerEncoder(blocks, max_tokens)
    if encoder == "chordmixer":
        return ChordMixerEncoder(dim, hidden, dropout, max_tokens)
    return IdentityEncoder()
