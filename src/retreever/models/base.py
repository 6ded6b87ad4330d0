"""What all models share: a context is encoded once and answered often, and inputs are checked at this border alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import reject
from retreever.batch import Batch, without_padding
from retreever.models.config import ModelConfig
from retreever.models.inputs import check_context, check_queries, take_batch
from retreever.nn.embed import PointEmbed, SequenceEmbed
from retreever.nn.heads import AnyHead
from retreever.objective import Loss, masked_mean

Contexts = Float[Tensor, "b n dx"]
Values = Shaped[Tensor, "b n *dy"]
Targets = Float[Tensor, "b m dx"]
Mask = Bool[Tensor, "b n"] | None


class Model(nn.Module, ABC):
    """A model with an embedding, a way to prepare contexts and read from them, and a head; subclasses say how."""

    config: ModelConfig
    embed: PointEmbed | SequenceEmbed
    head: AnyHead
    memory: ClassVar[Any]  # the type of what `encode` makes

    def encode(self, xc: Contexts, yc: Values, mask: Mask = None) -> Any:
        """Prepare context points (xc, yc) once; `answer` them as often as wanted. `mask` is True at real points."""
        check_context(self, self.config, xc, yc, mask)
        return self._encode(without_padding(xc, mask), without_padding(yc, mask), mask)

    def answer(self, memory: Any, xt: Targets) -> Distribution:
        """Predictions at `xt` from a prepared context."""
        if not isinstance(memory, self.memory):
            reject("memory", f"{self.memory.__name__} made by encode()", type(memory).__name__)
        check_queries(self, self.config, xt, memory.keys.shape[0])
        return self._answer(memory, xt)

    def predict(self, xc: Contexts, yc: Values, xt: Targets, mask: Mask = None) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); `mask` is True where a context point is real."""
        return self.answer(self.encode(xc, yc, mask), xt)

    def loss(self, batch: Batch) -> Loss:
        """Task loss, mean over real targets."""
        batch = take_batch(self, self.config, batch)
        dist = self._answer(self._encode(batch.xc, batch.yc, batch.context_mask), batch.xt)
        return Loss.only_task(masked_mean(self.head.loss(dist, batch.yt), batch.target_mask))

    @abstractmethod
    def tokens(self, n: int) -> int:
        """Tokens each query attends to when the context has `n` (the paper's convention)."""

    @abstractmethod
    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Any:
        """`encode` without its checks; padding holds zeros."""

    @abstractmethod
    def _answer(self, memory: Any, xt: Targets) -> Distribution:
        """`answer` without its checks."""
