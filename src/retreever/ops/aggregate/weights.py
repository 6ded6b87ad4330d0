"""The weights of a transformer layer as tensors, in the order kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ProjectionWeights(NamedTuple):
    """Weights that turn tokens into keys and values: a norm, and a projection without bias."""

    norm: Tensor
    norm_bias: Tensor
    to_kv: Tensor


class LayerWeights(NamedTuple):
    """Weights of a self-attention layer without projection biases: norm, attention, norm, gated feed-forward.

    With `pre`, residuals add to the raw input: x + f(LN x). Otherwise they add to the normalised input, LN x + f(LN x),
    and keys and values come from the raw input.
    """

    norm: Tensor
    norm_bias: Tensor
    to_q: Tensor
    to_kv: Tensor
    to_out: Tensor
    to_out_bias: Tensor
    feed_norm: Tensor
    feed_norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    heads: int
    pre: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in order."""
        return self[:12]

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return self.down.shape[1]
