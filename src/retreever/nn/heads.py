"""Heads: features (b, m, d) -> a distribution per query, and the loss that goes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from retreever.arguments import check_choice, check_int, reject
from retreever.nn.blocks import MLP
from retreever.nn.mixture import FunctionMixture, log_mean_exp

Head = Literal["gaussian", "bounded", "floored", "categorical", "point"]
HEADS: tuple[Head, ...] = get_args(Head)
FLOORS: dict[Head, float] = {"bounded": 0.05, "floored": 0.1}  # smallest standard deviations


class AnyHead(nn.Module, ABC):
    """A net of `depth` linear layers; with `norm` a layer norm first, for features from a pre-norm residual stream."""

    def __init__(self, dim: int, hidden: int, width: int, norm: bool = False, depth: int = 2) -> None:
        super().__init__()
        layers = MLP(dim, hidden, width, depth)
        self.net = nn.Sequential(nn.LayerNorm(dim), layers) if norm else layers

    def forward(self, features: Float[Tensor, "*k b m d"]) -> Distribution:
        return self.distribution(self.net(features))

    @abstractmethod
    def distribution(self, raw: Float[Tensor, "*k b m width"]) -> Distribution:
        """The distribution for an output of `net`."""

    def loss(self, dist: Distribution, y: Shaped[Tensor, "b m *dy"]) -> Float[Tensor, "b m"]:
        """Negative log-likelihood of every query, summed over known outputs."""
        return -log_likelihood(dist, y)


class GaussianHead(AnyHead):
    """Independent normals per output. std = exp(s), or with a floor: std = floor + (1 - floor) * softplus(s)."""

    def __init__(
        self, dim: int, hidden: int, outputs: int, norm: bool = False, depth: int = 2, floor: float | None = None
    ) -> None:
        super().__init__(dim, hidden, 2 * outputs, norm, depth)
        self.floor = floor

    def distribution(self, raw: Float[Tensor, "*k b m two_dy"]) -> Distribution:
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


def log_likelihood(dist: Distribution, y: Shaped[Tensor, "b m *dy"]) -> Float[Tensor, "*k b m"]:
    """Log-likelihood of every query, summed over its outputs; unknown outputs are NaN in `y` and count 0.

    Of k predictions per query where `dist` has k.
    """
    if isinstance(dist, FunctionMixture):
        return log_mean_exp(log_likelihood(dist.components, y))
    if not isinstance(dist, Independent):
        return dist.log_prob(y)
    known = ~y.isnan()
    per_output = dist.base_dist.log_prob(y.masked_fill(~known, 0))
    return per_output.masked_fill(~known, 0).sum(dim=-1)


def squared_error(dist: Distribution, y: Float[Tensor, "b m dy"]) -> Float[Tensor, "b m"]:
    """Squared error of the mean per query, summed over its outputs; unknown outputs are NaN in `y` and count 0."""
    known = ~y.isnan()
    return (dist.mean - y.masked_fill(~known, 0)).masked_fill(~known, 0).square().sum(dim=-1)


def join(parts: Sequence[Distribution]) -> Distribution:
    """The predictions of consecutive queries as one distribution."""
    first: Any = parts[0]
    every: Sequence[Any] = parts
    if len(parts) == 1:
        return first
    if isinstance(first, Categorical):
        return Categorical(logits=torch.cat([part.logits for part in every], dim=-2), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, Normal):
        mean, std = (torch.cat([getattr(part.base_dist, name) for part in every], -2) for name in ("loc", "scale"))
        return Independent(Normal(mean, std, validate_args=False), 1, validate_args=False)
    reject("chunk", "None, as predictions of this kind cannot be joined", type(first).__name__)


def make_head(head: Head, dim: int, hidden: int, outputs: int, norm: bool = False, depth: int = 2) -> AnyHead:
    """The head of that name; "bounded" and "floored" are Gaussian with a standard deviation of at least 0.05 or 0.1."""
    check_choice("head", head, HEADS)
    check_int("outputs", outputs, 1)
    if head == "categorical":
        return CategoricalHead(dim, hidden, outputs, norm, depth)
    if head == "point":
        return PointHead(dim, hidden, outputs, norm, depth)
    return GaussianHead(dim, hidden, outputs, norm, depth, FLOORS.get(head))
