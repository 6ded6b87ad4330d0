"""Embeddings of context points and queries as tokens of width d. Each has `context(x, y)` and `query(x)`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from retreever.nn.blocks import MLP


class PointEmbed(nn.Module):
    """Points of a function: (x, y) pairs as context, x alone as query (paper, appendix; depth 4 with ELU).

    With `waves` the coordinates are joined by sines and cosines of so many random projections (Fourier features).
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int,
        depth: int = 4,
        activation: type[nn.Module] = nn.ELU,
        waves: int = 0,
        frequency: float = 4.0,
    ) -> None:
        super().__init__()
        self.waves = FourierFeatures(dim_x, waves, frequency) if waves else None
        width = dim_x + 2 * waves
        self.of_context = MLP(width + dim_y, dim, dim, depth, activation)
        self.of_query = MLP(width, dim, dim, depth, activation)

    def context(self, x: Float[Tensor, "b n dx"], y: Float[Tensor, "b n dy"]) -> Float[Tensor, "b n d"]:
        """Tokens of context points."""
        return self.of_context(torch.cat([self._places(x), y], dim=-1))

    def query(self, x: Float[Tensor, "b m dx"]) -> Float[Tensor, "b m d"]:
        """Tokens of the places to predict at."""
        return self.of_query(self._places(x))

    def _places(self, x: Float[Tensor, "b n dx"]) -> Float[Tensor, "b n c"]:
        return x if self.waves is None else self.waves(x)


class FourierFeatures(nn.Module):
    """The coordinates, and sines and cosines of random projections of them.

    The frequencies are normal numbers whose spread rises from a tenth of `frequency` to `frequency`, in radians per
    unit: slow waves tell regions apart, fast ones neighbours. They are saved with the weights and not trained.
    """

    def __init__(self, dim_x: int, waves: int, frequency: float) -> None:
        super().__init__()
        spread = frequency * torch.logspace(-1, 0, waves)
        self.frequencies = nn.Buffer(torch.randn(dim_x, waves) * spread)

    def forward(self, x: Float[Tensor, "b n dx"]) -> Float[Tensor, "b n c"]:
        angles = x @ self.frequencies
        return torch.cat([x, angles.sin(), angles.cos()], dim=-1)


class TokenEmbed(nn.Module):
    """Raw tokens and raw queries, each by one linear layer; values are not used."""

    def __init__(self, width: int, query_width: int, dim: int) -> None:
        super().__init__()
        self.of_context = nn.Linear(width, dim)
        self.of_query = nn.Linear(query_width, dim)

    def context(self, x: Float[Tensor, "b n c"], y: Float[Tensor, "b n 0"]) -> Float[Tensor, "b n d"]:
        """Tokens of width d."""
        return self.of_context(x)

    def query(self, x: Float[Tensor, "b m q"]) -> Float[Tensor, "b m d"]:
        """Queries of width d."""
        return self.of_query(x)


class SequenceEmbed(nn.Module):
    """Symbols at positions: context is symbol and position, a query is a position alone (copy task).

    The symbol part of a query is the embedding of the zero vector, so a query holds nothing but its position.
    """

    def __init__(self, vocabulary: int, dim: int, hidden: int, dropout: float = 0.0, depth: int = 4) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.of_symbol = MLP(vocabulary, dim, dim, depth, nn.ELU)
        self.of_nothing = MLP(vocabulary, dim, dim, depth, nn.ELU)
        self.mix_context = MLP(dim, hidden, dim, 3)
        self.mix_query = MLP(dim, hidden, dim, 3)
        self.positions = SinusoidalPositions(dim)
        self.dropout = nn.Dropout(dropout)

    def context(self, x: Float[Tensor, "b n 1"], y: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Tokens of symbols at positions."""
        table = self.of_symbol(torch.eye(self.vocabulary, dtype=x.dtype, device=x.device))  # each symbol once
        # A product instead of a lookup: on a GPU the gradient of a lookup is slower and adds in no fixed order.
        symbols = F.one_hot(y, self.vocabulary).to(table.dtype) @ table
        return self.mix_context(self.dropout(symbols + self.positions(x)))

    def query(self, x: Float[Tensor, "b m 1"]) -> Float[Tensor, "b m d"]:
        """Tokens of positions alone."""
        nothing = self.of_nothing(x.new_zeros(1, 1, self.vocabulary))
        return self.mix_query(self.dropout(nothing + self.positions(x)))


class SinusoidalPositions(nn.Module):
    """Sines in even, cosines in odd dimensions, wavelengths from 2 pi to 10,000 * 2 pi; any position.

    Frequencies are computed in each call, in the dtype of the positions, at least float32: a buffer would lose digits
    when the model changes its dtype.
    """

    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x: Float[Tensor, "b n 1"]) -> Float[Tensor, "b n d"]:
        rows = x[:1] if x.stride(0) == 0 else x  # the same positions in every row of the batch
        dtype = torch.promote_types(x.dtype, torch.float32)
        half = torch.arange(0, self.dim, 2, dtype=dtype, device=x.device)
        angle = rows.to(dtype) * torch.exp(half * (-math.log(self.base) / self.dim))
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., : self.dim]
        return waves.to(x.dtype).expand(x.shape[0], -1, -1)
