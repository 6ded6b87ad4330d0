"""Base class of all models: a context is encoded once and queried often.

Inputs are checked against the settings of the model here, and not again in the layers below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from retreever.arguments import check_int, reject
from retreever.batch import Batch, as_batch, check_points, without_padding
from retreever.checks import check_finite, check_float, check_like_weights, check_tensor, values_readable
from retreever.models.config import AnyConfig
from retreever.nn.embed import PointEmbed, SequenceEmbed, TokenEmbed
from retreever.nn.heads import AnyHead, join
from retreever.objective import Loss, masked_mean
from retreever.ops.backend import exporting

Contexts = Float[Tensor, "b n dx"]
Values = Shaped[Tensor, "b n *dy"]
Targets = Float[Tensor, "b m dx"]
Mask = Bool[Tensor, "b n"] | None
Tokens = Float[Tensor, "b n c"]
Queries = Float[Tensor, "b m q"]
CHUNK = 16_384  # queries that are answered at a time in evaluation


class Model(nn.Module, ABC):
    """A model with an embedding, a head, and `_encode` and `_answer`, which subclasses define."""

    config: AnyConfig
    embed: PointEmbed | SequenceEmbed | TokenEmbed
    head: AnyHead
    memory: ClassVar[Any]  # the type that `encode` returns

    def encode(self, xc: Contexts, yc: Values, mask: Mask = None) -> Any:
        """Prepare context points (xc, yc) for any number of calls of `answer`. `mask` is True at real points.

        Raw tokens are `xc`; they have no values, so `yc` is `tokens[..., :0]`.
        """
        check_context(self, xc, yc, mask)
        return self._encode(without_padding(xc, mask), without_padding(yc, mask), mask)

    def answer(self, memory: Any, xt: Targets) -> Distribution:
        """Predictions at `xt` from a prepared context."""
        check_memory(self, memory, xt)
        return self._answer(memory, xt)

    def predict(
        self, xc: Contexts, yc: Values, xt: Targets, mask: Mask = None, *, chunk: int | None = None
    ) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); `mask` is True where a context point is real.

        `chunk` answers so many queries at a time, without gradients. Without it this happens in evaluation, by 16,384,
        where there are more.
        """
        return self._in_chunks(xc, yc, xt, mask, chunk)

    def _in_chunks(
        self, xc: Contexts, yc: Values, xt: Targets, mask: Mask, chunk: int | None, **reading: Any
    ) -> Distribution:
        """`predict`; `reading` goes to `answer`."""
        if (size := chunk_size(self, xt, chunk)) is None:
            return self.answer(self.encode(xc, yc, mask), xt, **reading)
        with torch.no_grad():
            memory = self.encode(xc, yc, mask)
            return join([self.answer(memory, part, **reading) for part in torch.split(xt, size, dim=1)])

    def forward(self, first: Batch | tuple[Tensor, ...] | Tensor, *rest: Any, **named: Any) -> Any:
        """The loss of a batch, as DistributedDataParallel and others call it, or predictions, as `predict` does.

        A batch is a `Batch` or a tuple (xc, yc, xt, yt) with masks behind it, as a DataLoader gives it.

        With `inputs="tokens"` it takes raw tokens, raw queries and a mask, and gives logits, or means.
        """
        if isinstance(first, Batch | tuple | list):
            return self.loss(as_batch("batch", first), *rest, **named)
        if self.config.inputs == "tokens":
            return self._read_tokens(first, *rest, **named)
        return self.predict(first, *rest, **named)

    def _read_tokens(
        self, tokens: Tokens, queries: Queries | None = None, mask: Mask = None
    ) -> Float[Tensor, "b m out"]:
        if queries is None:
            reject("queries", "raw queries (b, m, q), beside the tokens", None)
        _check_width(self.config, tokens)
        dist = self.predict(tokens, tokens[..., :0], queries, mask)
        return dist.logits if isinstance(dist, Categorical) else dist.mean

    def loss(self, batch: Batch) -> Loss:
        """Task loss, mean over real targets."""
        batch = self.take(batch)
        dist = self._predict(batch.xc, batch.yc, batch.context_mask, batch.xt)
        return Loss.only_task(masked_mean(self.head.loss(dist, batch.yt), batch.target_mask))

    def take(self, batch: Batch) -> Batch:
        """The batch, checked against the model and with padding cleared; unknown outputs are NaN in its `yt`."""
        return take_batch(self, batch)

    @abstractmethod
    def tokens(self, n: int) -> int:
        """Tokens each query attends to when the context has `n` (the paper's convention)."""

    def _predict(self, xc: Contexts, yc: Values, mask: Mask, xt: Targets) -> Distribution:
        """`predict` without its checks; models override it where both steps at once are faster."""
        return self._answer(self._encode(xc, yc, mask), xt)

    @abstractmethod
    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Any:
        """`encode` without its checks; padding holds zeros."""

    @abstractmethod
    def _answer(self, memory: Any, xt: Targets) -> Distribution:
        """`answer` without its checks."""


def chunk_size(model: Model, xt: Tensor, chunk: int | None) -> int | None:
    """How many queries to answer at a time, without gradients; None answers all at once."""
    if chunk is not None:
        check_int("chunk", chunk, 1)
        return chunk
    if model.training or torch.compiler.is_compiling() or exporting():
        return None
    return CHUNK if isinstance(xt, Tensor) and xt.dim() == 3 and xt.shape[1] > CHUNK else None


def check_context(model: Model, xc: Tensor, yc: Tensor, mask: Tensor | None, checked: bool = False) -> None:
    """Context points must have the widths, types and device of the model.

    `checked` skips `check_points` and the width, for points that have passed both.
    """
    config = model.config
    name = "tokens" if config.inputs == "tokens" else "xc"
    if not checked:
        check_points(name, xc, "yc", yc, mask)
        _check_width(config, xc)
    check_like_weights(name, xc, model)
    if config.inputs == "sequence":
        _check_classes("yc", yc, "n", xc, config.dim_y, mask)
    else:
        check_tensor("yc", yc, "b n dy", dy=0 if config.inputs == "tokens" else config.dim_y)
        check_float("yc", yc)


def check_memory(model: Model, memory: Any, xt: Tensor) -> None:
    """A memory must be what `encode` returns, and the queries must fit it."""
    if not isinstance(memory, model.memory):
        reject("memory", f"{model.memory.__name__} made by encode()", type(memory).__name__)
    check_queries(model, xt, memory.rows)


def check_queries(model: Model, xt: Tensor, b: int) -> None:
    """Queries must have the width, type and device of the model, and a row per context."""
    name = "queries" if model.config.inputs == "tokens" else "xt"
    check_tensor(name, xt, "b m dx", b=b, dx=_coordinates(model.config))
    check_float(name, xt)
    check_like_weights(name, xt, model)
    if not xt.is_cuda:  # reading values on CUDA would make every call wait for the device
        check_finite(name, xt)


def take_batch(model: Model, batch: Batch) -> Batch:
    """`Model.take`. Heads and rewards ignore unknown outputs."""
    if not isinstance(batch, Batch):
        reject("batch", "a Batch", type(batch).__name__)
    config = model.config
    _check_width(config, batch.xc)  # before it is compared with xt
    batch.validate()
    check_context(model, batch.xc, batch.yc, batch.context_mask, checked=True)
    check_tensor("xt", batch.xt, "b m dx", dx=_coordinates(config))
    if config.head == "categorical":
        _check_classes("yt", batch.yt, "m", batch.xt, config.out, batch.target_mask)
    else:
        check_tensor("yt", batch.yt, "b m dy", dy=config.out)
        check_float("yt", batch.yt)
    truth = batch.truth
    if batch.output_mask is None and not values_readable(truth) and truth.dtype.is_floating_point:
        truth = truth.masked_fill(truth.isnan(), torch.inf)  # could not be checked: NaN must not count as unknown
    context = {name: without_padding(getattr(batch, name), batch.context_mask) for name in ("xc", "yc")}
    return replace(batch, **context, xt=without_padding(batch.xt, batch.target_mask), yt=truth)


def _check_width(config: AnyConfig, xc: Tensor) -> None:
    if config.inputs == "tokens":
        check_tensor("tokens", xc, "b n c", c=config.dim_y)
    else:
        check_tensor("xc", xc, "b n dx", dx=_coordinates(config))


def _coordinates(config: AnyConfig) -> int:
    return 1 if config.inputs == "sequence" else config.dim_x


def _check_classes(argument: str, y: Tensor, axis: str, x: Tensor, count: int, mask: Tensor | None) -> None:
    """`y` must hold an integer for every point `x`, from 0 to count - 1 wherever `mask` is True."""
    if y.dim() != 2 or y.dtype != torch.int64:
        shape = f"integers (b={x.shape[0]}, {axis}={x.shape[1]})"
        if y.dim() != 2:
            reject(argument, shape, tuple(y.shape))
        reject(argument, f"{shape} of dtype torch.int64", y.dtype)
    if not values_readable(y):
        return
    real = without_padding(y, mask)
    if bool(((real < 0) | (real >= count)).any()):
        reject(argument, f"integers from 0 to {count - 1}", f"{int(real.min())} to {int(real.max())}")
