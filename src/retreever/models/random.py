"""Random: the baseline of the copy task, a uniform guess among all symbols."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from retreever.batch import Batch
from retreever.models.config import ModelConfig, resolve
from retreever.objective import Loss, masked_mean


class RandomGuess(nn.Module):
    """Predicts a symbol per query, drawn from a fixed stream."""

    def __init__(self, config: ModelConfig | None = None, seed: int = 0, **fields: Any) -> None:
        super().__init__()
        self.config = resolve(ModelConfig, config, fields)
        self.generator = torch.Generator().manual_seed(seed)

    def predict(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        xt: Float[Tensor, "b m dx"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Distribution:
        """A near-uniform distribution whose most likely symbol is drawn at random, per query."""
        noise = torch.rand(*xt.shape[:2], self.config.out, generator=self.generator)
        return Categorical(logits=1e-3 * noise.to(xt.device), validate_args=False)

    def loss(self, batch: Batch) -> Loss:
        """Cross entropy of the guess: log of the number of symbols."""
        dist = self.predict(batch.xc, batch.yc, batch.xt)
        return Loss.only_task(masked_mean(-dist.log_prob(batch.yt), batch.target_mask))

    def tokens(self, n: int) -> int:
        """0: a guess reads no tokens."""
        return 0
