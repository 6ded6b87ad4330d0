"""What models without a search share: queries attend to prepared keys and values, and the task loss is all there is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import reject
from retreever.attention import CrossAttention
from retreever.batch import Batch
from retreever.models.config import ModelConfig
from retreever.models.inputs import check_queries, take_targets
from retreever.nn.embed import PointEmbed, SequenceEmbed
from retreever.nn.heads import AnyHead
from retreever.objective import Loss, masked_mean
from retreever.results import KeyValues


class PlainModel(nn.Module, ABC):
    """A model that `encode`s a context into keys and values; subclasses say how."""

    config: ModelConfig
    embed: PointEmbed | SequenceEmbed
    attention: CrossAttention
    head: AnyHead

    @abstractmethod
    def encode(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> KeyValues:
        """Prepare a context once; `answer` it as often as wanted."""

    def answer(self, memory: KeyValues, xt: Float[Tensor, "b m dx"]) -> Distribution:
        """Predictions at `xt` from a prepared context."""
        if not isinstance(memory, KeyValues):
            reject("memory", "KeyValues made by encode()", type(memory).__name__)
        check_queries(self.config, self.attention.block.to_q.weight, xt, memory.keys.shape[0])
        return self.head(self.attention(self.embed.query(xt), memory).output)

    def predict(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        xt: Float[Tensor, "b m dx"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); `mask` is True where a context point is real."""
        return self.answer(self.encode(xc, yc, mask), xt)

    def loss(self, batch: Batch) -> Loss:
        """Task loss, mean over real targets."""
        xt, yt = take_targets(self.config, batch)
        dist = self.predict(batch.xc, batch.yc, xt, batch.context_mask)
        return Loss.only_task(masked_mean(self.head.loss(dist, yt), batch.target_mask))
