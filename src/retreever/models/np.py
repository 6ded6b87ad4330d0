"""NP (Garnelo et al., 2018) and ANP (Kim et al., 2019): neural processes with a global latent."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from retreever.batch import Batch
from retreever.checks import drawn_from
from retreever.models.base import Contexts, Mask, Targets, Values
from retreever.models.neural_process import Encoded, NPConfig, all_points, build, read
from retreever.models.sampled import Noise, SampledProcess
from retreever.nn.heads import log_likelihood
from retreever.nn.mixture import FunctionMixture, log_mean_exp


class NP(SampledProcess):
    """Neural process: a mean over points, and a latent with a learned distribution given any set of points."""

    def __init__(self, config: NPConfig | None = None, **fields: Any) -> None:
        super().__init__(config, fields)
        dim = self.config.dim
        self.encoders = nn.ModuleList([self._deterministic()])
        self.latent = self._pooling(2 * dim)
        self.head = self._decoder(2 * dim)

    def latent_given(self, x: Contexts, y: Values, mask: Mask = None) -> Any:
        """Distribution of the latent given points: the prior from the context, the posterior from all points."""
        mean, raw = self.latent.build(x, y, mask).chunk(2, dim=-1)
        return Independent(Normal(mean, 0.1 + 0.9 * raw.sigmoid(), validate_args=False), 1, validate_args=False)

    def _noise(self, xc: Contexts, samples: int, generator: torch.Generator | None = None) -> Noise:
        shape = (xc.shape[0], samples, self.config.dim)
        return Noise(torch.randn(shape, dtype=xc.dtype, **drawn_from(generator, xc.device)).to(xc.device))

    def _sampled(self, xc: Contexts, yc: Values, mask: Mask, noise: Tensor) -> Encoded:
        latents = _drawn(self.latent_given(xc, yc, mask), noise)
        return Encoded(build(self.encoders, xc, yc, mask), xc.shape[0], latents)

    def _answer(self, memory: Encoded, xt: Targets) -> Distribution:
        assert memory.latents is not None
        features = torch.cat([read(self.encoders, memory.parts, xt), xt], dim=-1)  # (b, m, d + dx)
        k, m, dim = memory.latents.shape[0], xt.shape[1], self.config.dim
        latents = memory.latents[:, :, None].expand(-1, -1, m, -1)
        both = torch.cat([features[..., :dim].expand(k, -1, -1, -1), latents, xt.expand(k, -1, -1, -1)], dim=-1)
        return FunctionMixture(self.head(both))

    def _objective(self, batch: Batch, noise: Tensor) -> Float[Tensor, ""]:
        """Importance-weighted bound per point; one sample gives reconstruction minus KL."""
        x, y, mask = all_points(batch)
        context = (batch.xc, batch.yc, batch.context_mask)
        known = ~y.isnan().any(dim=-1) if mask is None else mask & ~y.isnan().any(dim=-1)
        prior, posterior = self.latent_given(*context), self.latent_given(x, y.nan_to_num(0.0), known)
        latents = _drawn(posterior, noise)
        dist: Any = self._answer(Encoded(build(self.encoders, *context), x.shape[0], latents), x)
        found = log_likelihood(dist.components, y)  # (k, b, n + m)
        real = torch.ones_like(x[..., 0]) if mask is None else mask.to(found.dtype)
        fit = found.masked_fill(real == 0, 0).sum(dim=-1)
        if latents.shape[0] == 1:
            bound = fit[0] - kl_divergence(posterior, prior)
        else:
            bound = log_mean_exp(fit + prior.log_prob(latents) - posterior.log_prob(latents))
        return -(bound / real.sum(dim=-1)).mean()


class ANP(NP):
    """NP with attention: from targets to the context, and among context points."""

    attentive = True


def _drawn(latent: Any, noise: Float[Tensor, "b k d"]) -> Float[Tensor, "k b d"]:
    return latent.mean + latent.stddev * noise.transpose(0, 1)
