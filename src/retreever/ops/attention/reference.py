"""Softmax attention written out in plain torch: any dtype and device, second derivatives, torch.func."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def attention_reference(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None,
    dropout: float,
) -> Float[Tensor, "b m h e"]:
    """Attention by two matrix products."""
    scores = (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5  # (b, h, m, n)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights @ values.transpose(1, 2)).transpose(1, 2)


def attend_few(
    q: Float[Tensor, "g m h e"],
    keys: Float[Tensor, "g n h e"],
    values: Float[Tensor, "g n h e"],
    mask: Bool[Tensor, "g n"] | None,
    dropout: float,
) -> Float[Tensor, "g m h e"]:
    """Attention of a few queries to a few tokens, for very many rows at once, by sums of products."""
    scores = (q[:, :, None] * keys[:, None]).sum(dim=-1) * q.shape[-1] ** -0.5  # (g, m, n, h)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, :, None], -math.inf)
    weights = F.dropout(scores.softmax(dim=2), dropout)
    return (weights[..., None] * values[:, None]).sum(dim=2)
