"""Attention among siblings, forward and backward by hand: `ascent` runs it on one level of a tree at a time.

Queries, keys and values of a family lie side by side (g, k, 3, h, e), queries already scaled; the share a child gives a
sibling is one of (g, k, k, h), query before key.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.cpu.numba_here import plain_floats

Families = Float[Tensor, "g k 3 h e"]
Pairs = Float[Tensor, "g k k h"]


def attend(
    qkv: Families,
    shares: Pairs,
    factor: Pairs | None,
    hidden: Bool[Tensor, "g 1 k 1"] | None,
    out: Float[Tensor, "r d"],
) -> None:
    """Write the attention weights, before dropout by `factor`, into `shares` and what they read into `out`.

    Nobody attends to `hidden` children; some child of every family must not be.
    """
    if _few(shares) and plain_floats(qkv, shares, out):
        from retreever.cpu.siblings_kernel import attend_families

        attend_families(qkv, shares, factor, hidden, out)
        return
    q, keys, values = qkv.unbind(dim=2)
    scores = (q[:, :, None] * keys[:, None]).sum(dim=-1)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    torch.ops.aten._softmax.out(scores, 2, False, out=shares)
    used = shares if factor is None else shares * factor
    torch.sum(used[..., None] * values[:, None], dim=2, out=out.view(q.shape))


def attend_backward(
    qkv: Families, shares: Pairs, factor: Pairs | None, grad: Float[Tensor, "r d"], out: Families
) -> None:
    """From the gradient of what was read, write that of queries, keys and values into `out`."""
    if _few(shares) and plain_floats(qkv, shares, grad, out):
        from retreever.cpu.siblings_kernel import attend_families_gradient

        attend_families_gradient(qkv, shares, factor, grad, out)
        return
    q, keys, values = qkv.unbind(dim=2)
    d_q, d_keys, d_values = out.unbind(dim=2)
    slope = grad.view(q.shape)[:, :, None]
    d_shares, used = (slope * values[:, None]).sum(dim=-1), shares
    if factor is not None:
        d_shares, used = d_shares * factor, shares * factor
    torch.sum(used[..., None] * slope, dim=1, out=d_values)
    d_scores = torch.ops.aten._softmax_backward_data(d_shares, shares, 2, shares.dtype)[..., None]
    torch.sum(d_scores * keys[:, None], dim=2, out=d_q)
    torch.sum(d_scores * q[:, :, None], dim=1, out=d_keys)


def _few(shares: Pairs) -> bool:
    """Whether the pairs of a family have room in a kernel."""
    return shares[0].numel() <= 1024
