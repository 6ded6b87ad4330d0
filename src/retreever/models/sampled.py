"""Base of the neural processes that sample: predictions are mixtures over latents or bootstraps of the context.

Samples are drawn when a context is encoded, so that all answers of one memory belong to the same functions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import check_int, reject
from retreever.batch import Batch, without_padding
from retreever.models.base import Contexts, Mask, Targets, Values, check_context
from retreever.models.neural_process import Encoded, NeuralProcess
from retreever.objective import Loss

SAMPLES = 50  # per context in evaluation, as in the literature


class Noise(NamedTuple):
    """Random numbers that fix the samples of a training step."""

    values: Float[Tensor, "b *shape"]

    def rows(self, which: slice) -> Noise:
        """Those of some tasks of the batch."""
        return Noise(self.values[which])


class SampledProcess(NeuralProcess):
    """A neural process with `_noise`, `_sampled` and `_objective`, which subclasses define."""

    copies: ClassVar[int] = SAMPLES  # predictions behind each prediction in evaluation

    def encode(
        self,
        xc: Contexts,
        yc: Values,
        mask: Mask = None,
        samples: int = SAMPLES,
        generator: torch.Generator | None = None,
    ) -> Encoded:
        """Prepare context points and draw `samples` for them, from `generator` or torch's own."""
        check_int("samples", samples, 1)
        check_context(self, xc, yc, mask)
        xc, yc = without_padding(xc, mask), without_padding(yc, mask)
        return self._sampled(xc, yc, mask, self._noise(xc, samples, generator).values)

    def predict(
        self,
        xc: Contexts,
        yc: Values,
        xt: Targets,
        mask: Mask = None,
        samples: int = SAMPLES,
        generator: torch.Generator | None = None,
        *,
        chunk: int | None = None,
    ) -> Distribution:
        """A mixture of `samples` predictions at `xt`: `log_prob` is per point, `sample` draws whole functions.

        For many queries call `encode` once and `answer` for parts of them: their samples belong together.
        """
        if chunk is not None:
            reject("chunk", "None; encode once and answer parts of the queries, which share their samples", chunk)
        return self.answer(self.encode(xc, yc, mask, samples, generator), xt)

    def draws_for(self, batch: Batch, generator: torch.Generator) -> Noise:
        """Draws that fix the samples of `loss`, for the whole batch."""
        return self._noise(batch.xc, self.config.samples, generator)

    def loss(self, batch: Batch, draws: Noise | None = None, mean: Callable[[Tensor], Tensor] | None = None) -> Loss:
        """In training the bound of the model, in evaluation the negative log-likelihood of the targets.

        Args:
            batch: context points and targets.
            draws: made by `draws_for`, fix the samples.
            mean: not needed, since rows do not depend on one another.
        """
        if not self.training:
            return super().loss(batch)
        batch = self.take(batch)
        noise = self._noise(batch.xc, self.config.samples) if draws is None else draws
        return Loss.only_task(self._objective(batch, noise.values))

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Encoded:
        return self._sampled(xc, yc, mask, self._noise(xc, SAMPLES).values)

    @abstractmethod
    def _noise(self, xc: Contexts, samples: int, generator: torch.Generator | None = None) -> Noise:
        """Random numbers for `samples` samples of every context."""

    @abstractmethod
    def _sampled(self, xc: Contexts, yc: Values, mask: Mask, noise: Tensor) -> Encoded:
        """`_encode` with given random numbers."""

    @abstractmethod
    def _objective(self, batch: Batch, noise: Tensor) -> Float[Tensor, ""]:
        """The training loss of a checked batch."""
