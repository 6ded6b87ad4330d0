"""CNP (Garnelo et al., 2018) and CANP: conditional neural processes, without a latent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.models.base import Contexts, Mask, Targets, Values
from retreever.models.neural_process import Encoded, NeuralProcess, NPConfig, all_points, build, read
from retreever.objective import Loss, masked_mean


class CNP(NeuralProcess):
    """Conditional neural process: two means over points, and a decoder."""

    def __init__(self, config: NPConfig | None = None, **fields: Any) -> None:
        super().__init__(config, fields)
        self.encoders = nn.ModuleList([self._deterministic(), self._pooling(self.config.dim)])
        self.head = self._decoder(2 * self.config.dim)

    def loss(self, batch: Batch) -> Loss:
        """In training the negative log-likelihood of context and targets, in evaluation that of the targets."""
        if not self.training:
            return super().loss(batch)
        batch = self.take(batch)
        x, y, mask = all_points(batch)
        dist = self._predict(batch.xc, batch.yc, batch.context_mask, x)
        return Loss.only_task(masked_mean(self.head.loss(dist, y), mask))

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Encoded:
        return Encoded(build(self.encoders, xc, yc, mask), xc.shape[0])

    def _answer(self, memory: Encoded, xt: Targets) -> Distribution:
        return self.head(torch.cat([read(self.encoders, memory.parts, xt), xt], dim=-1))


class CANP(CNP):
    """CNP with attention: from targets to the context, and among context points."""

    attentive = True
