"""Mixtures of functions: what neural processes predict that sample a latent or a bootstrap."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution


class FunctionMixture(Distribution):
    """An equal mixture of k predictions, each of which is a whole function.

    `log_prob` treats points one by one: log (1/k) sum_k p_k(y), the measure of the literature. `sample` takes one
    component for all points of a context, so that a sample is a function.

    Args:
        components: `Independent` normals of batch shape (k, b, m).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False

    def __init__(self, components: Any) -> None:
        self.components = components
        super().__init__(components.batch_shape[1:], components.event_shape, validate_args=False)

    @property
    def mean(self) -> Float[Tensor, "b m dy"]:
        """Mean over components."""
        return self.components.mean.mean(dim=0)

    @property
    def variance(self) -> Float[Tensor, "b m dy"]:
        """Mean of the variances plus variance of the means."""
        return self.components.variance.mean(dim=0) + self.components.mean.var(dim=0, correction=0)

    def log_prob(self, value: Float[Tensor, "b m dy"]) -> Float[Tensor, "b m"]:
        """Log-density of every point, its outputs summed."""
        return log_mean_exp(self.components.log_prob(value))

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Functions with noise, (*sample_shape, b, m, dy): one component per context, for all its points."""
        mean, std = self.components.mean, self.components.stddev  # (k, b, m, dy)
        k, b = mean.shape[:2]
        count = math.prod(sample_shape)
        component = torch.randint(k, (count, b), device=mean.device)
        row = torch.arange(b, device=mean.device)
        drawn = torch.normal(mean[component, row], std[component, row])
        return drawn.reshape(*sample_shape, *mean.shape[1:])


def log_mean_exp(values: Float[Tensor, "k *b"]) -> Float[Tensor, "*b"]:
    """Logarithm of the mean of exp(values) over the first axis."""
    return values.logsumexp(dim=0) - math.log(values.shape[0])
