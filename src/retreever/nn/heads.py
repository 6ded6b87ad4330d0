"""Heads: features (b, m, d) -> a distribution per query, and the loss that goes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from retreever.arguments import check_choice, check_int
from retreever.nn.blocks import MLP

Head = Literal["gaussian", "bounded", "categorical", "point"]
HEADS: tuple[Head, ...] = ("gaussian", "bounded", "categorical", "point")


class AnyHead(nn.Module, ABC):
    """A net of two linear layers; with `norm` a layer norm first, for features from a pre-norm residual stream."""

    def __init__(self, dim: int, hidden: int, width: int, norm: bool = False) -> None:
        super().__init__()
        layers = MLP(dim, hidden, width, 2)
        self.net = nn.Sequential(nn.LayerNorm(dim), layers) if norm else layers

    def forward(self, features: Float[Tensor, "b m d"]) -> Distribution:
        return self.distribution(self.net(features))

    @abstractmethod
    def distribution(self, raw: Float[Tensor, "b m width"]) -> Distribution:
        """The distribution for an output of `net`."""

    def loss(self, dist: Distribution, y: Shaped[Tensor, "b m *dy"]) -> Float[Tensor, "b m"]:
        """Negative log-likelihood of every query, summed over known outputs."""
        return -log_likelihood(dist, y)


class GaussianHead(AnyHead):
    """Independent normals per output. std = exp(s), or with a floor: std = floor + (1 - floor) * softplus(s)."""

    def __init__(self, dim: int, hidden: int, outputs: int, norm: bool = False, floor: float | None = None) -> None:
        super().__init__(dim, hidden, 2 * outputs, norm)
        self.floor = floor

    def distribution(self, raw: Float[Tensor, "b m two_dy"]) -> Distribution:
        """Normals with the mean and the spread that `net` gives."""
        mean, raw = raw.chunk(2, dim=-1)
        std = raw.exp() if self.floor is None else self.floor + (1 - self.floor) * F.softplus(raw)
        return Independent(Normal(mean, std, validate_args=False), 1, validate_args=False)


class CategoricalHead(AnyHead):
    """A distribution over classes per query, trained by cross entropy."""

    def distribution(self, raw: Float[Tensor, "b m classes"]) -> Distribution:
        """Classes with the logits that `net` gives."""
        return Categorical(logits=raw, validate_args=False)


class PointHead(AnyHead):
    """A value per query without uncertainty: a normal of unit variance, trained by squared error."""

    def distribution(self, raw: Float[Tensor, "b m dy"]) -> Distribution:
        """Normals of unit variance around what `net` gives."""
        return Independent(Normal(raw, torch.ones_like(raw), validate_args=False), 1, validate_args=False)

    def loss(self, dist: Distribution, y: Float[Tensor, "b m dy"]) -> Float[Tensor, "b m"]:
        """Squared error of every query, summed over known outputs."""
        return squared_error(dist, y)


def log_likelihood(dist: Distribution, y: Shaped[Tensor, "b m *dy"]) -> Float[Tensor, "b m"]:
    """Log-likelihood of every query, summed over its outputs; unknown outputs are NaN in `y` and count 0."""
    if not isinstance(dist, Independent):
        return dist.log_prob(y)
    known = ~y.isnan()
    per_output = dist.base_dist.log_prob(y.masked_fill(~known, 0))
    return per_output.masked_fill(~known, 0).sum(dim=-1)


def squared_error(dist: Distribution, y: Float[Tensor, "b m dy"]) -> Float[Tensor, "b m"]:
    """Squared error of the mean per query, summed over its outputs; unknown outputs are NaN in `y` and count 0."""
    known = ~y.isnan()
    return (dist.mean - y.masked_fill(~known, 0)).masked_fill(~known, 0).square().sum(dim=-1)


def make_head(head: Head, dim: int, hidden: int, outputs: int, norm: bool = False) -> AnyHead:
    """The head of that name; "bounded" is the Gaussian with a standard deviation of at least 0.05."""
    check_choice("head", head, HEADS)
    check_int("outputs", outputs, 1)
    if head == "categorical":
        return CategoricalHead(dim, hidden, outputs, norm)
    if head == "point":
        return PointHead(dim, hidden, outputs, norm)
    return GaussianHead(dim, hidden, outputs, norm, floor=0.05 if head == "bounded" else None)
