"""BNP and BANP (Lee et al., 2020): conditional neural processes that bootstrap the residuals of their context."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.checks import drawn_from
from retreever.models.base import Contexts, Mask, Targets, Values
from retreever.models.neural_process import Encoded, NPConfig, all_points, build, read
from retreever.models.sampled import Noise, SampledProcess
from retreever.nn.heads import log_likelihood
from retreever.nn.mixture import FunctionMixture, log_mean_exp
from retreever.objective import masked_mean

GOLDEN = 0.6180339887498949


class BNP(SampledProcess):
    """Bootstrapping neural process: a CNP whose decoder also sees the encoding of a bootstrapped context.

    Zeros in its place make the prediction of the CNP itself, the base.
    """

    def __init__(self, config: NPConfig | None = None, **fields: Any) -> None:
        super().__init__(config, fields)
        dim = self.config.dim
        self.encoders = nn.ModuleList([self._deterministic(), self._pooling(dim)])
        self.head = self._decoder(4 * dim)

    def bootstrap(
        self, x: Contexts, y: Values, mask: Mask, first: Int[Tensor, "kb n"], second: Int[Tensor, "kb n"]
    ) -> Values:
        """Bootstrapped values at `x`, (k * b, n, dy): the prediction from resampled points plus resampled residuals.

        Args:
            x: places, k copies of the b contexts one after another; `y` and `mask` likewise.
            y: their values.
            mask: True where a point is real.
            first: which points each context is predicted from.
            second: which residual each point gets.
        """
        with torch.no_grad():
            parts = build(self.encoders, take(x, first), take(y, first), mask)
            base = self._decode(read(self.encoders, parts, x), x)
            residual = take((y - base.mean) / base.stddev, second)
            real = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
            centre = (residual * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp_min(1)
            return base.mean + base.stddev * (residual - centre)

    def _noise(self, xc: Contexts, samples: int, generator: torch.Generator | None = None) -> Noise:
        shape = (xc.shape[0], 2, samples, xc.shape[1])
        return Noise(torch.rand(shape, **drawn_from(generator, xc.device)).to(xc.device))

    def _sampled(self, xc: Contexts, yc: Values, mask: Mask, noise: Tensor) -> Encoded:
        order = own_order(xc, yc, mask)  # the same noise takes the same points whatever order they are given in
        x, y = take(xc, order), take(yc, order)
        mask = None if mask is None else mask.gather(1, order)
        k = noise.shape[2]
        first, second = drawn_points(noise, mask).flatten(1, 2)
        xs, ys, masks = _copies(x, k), _copies(y, k), None if mask is None else _copies(mask, k)
        bootstraps = build(self.encoders, xs, self.bootstrap(xs, ys, masks, first, second), masks)
        return Encoded(build(self.encoders, x, y, mask), x.shape[0], bootstraps=bootstraps)

    def _answer(self, memory: Encoded, xt: Targets) -> Distribution:
        return self._mixture(memory, xt, read(self.encoders, memory.parts, xt))

    def _objective(self, batch: Batch, noise: Tensor) -> Float[Tensor, ""]:
        """Negative log-likelihood of context and targets, of the base and of the mixture over bootstraps."""
        x, y, mask = all_points(batch)
        memory = self._sampled(batch.xc, batch.yc, batch.context_mask, noise)
        features = read(self.encoders, memory.parts, x)
        base = log_likelihood(self._decode(features, x), y)
        mixture = log_mean_exp(log_likelihood(self._mixture(memory, x, features).components, y))
        return -masked_mean(base + mixture, mask)

    def _mixture(self, memory: Encoded, xt: Targets, features: Tensor) -> FunctionMixture:
        b = memory.rows
        k = _rows(memory.bootstraps) // b
        extra = torch.unflatten(read(self.encoders, memory.bootstraps, _copies(xt, k)), 0, (k, b))
        return FunctionMixture(self._decode(features.expand(k, -1, -1, -1), xt.expand(k, -1, -1, -1), extra))

    def _decode(self, features: Tensor, xt: Tensor, extra: Tensor | None = None) -> Any:
        """The decoder on features and places, and on features of a bootstrap; zeros where there is none."""
        extra = torch.zeros_like(features) if extra is None else extra
        return self.head(torch.cat([features, xt, extra], dim=-1))


class BANP(BNP):
    """BNP with attention: from targets to the context, and among context points."""

    attentive = True


def own_order(x: Contexts, y: Values, mask: Mask) -> Int[Tensor, "b n"]:
    """A permutation that sorts the points of every row by their numbers, padding last."""
    key = torch.zeros_like(x[..., 0])
    for column in torch.cat([x, y], dim=-1).unbind(dim=-1):
        key = GOLDEN * key + column
    return (key if mask is None else key.masked_fill(~mask, torch.inf)).argsort(dim=1, stable=True)


def drawn_points(uniform: Float[Tensor, "b 2 k n"], mask: Mask) -> Int[Tensor, "2 k b n"]:
    """Points drawn with replacement, among the real ones, which come first."""
    n = uniform.shape[-1]
    count = torch.full_like(uniform[:, 0, 0, :1], n) if mask is None else mask.sum(dim=1, keepdim=True)
    drawn = (uniform.permute(1, 2, 0, 3) * count).long()
    return torch.minimum(drawn, (count - 1).long())  # a number just below 1 may round up


def take(values: Float[Tensor, "b n d"], index: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
    """Some points of every row, by their numbers."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def _copies(values: Tensor, k: int) -> Tensor:
    """k copies of all rows, one after another."""
    return values.expand(k, *values.shape).flatten(0, 1)


def _rows(parts: tuple[Any, ...]) -> int:
    pooled: Tensor = parts[1]
    return pooled.shape[0]
