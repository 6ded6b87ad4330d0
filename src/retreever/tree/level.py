"""One level of the transformer aggregator, up and down by hand; `climb` goes up a tree with it.

The layer is that of `self_attention_block`, in one of two forms. They differ in what a norm leaves alone:

    "pre":         y = x + attend(LN x),        out = y + feed_forward(LN y),     keys and values of LN x
    "normalised":  y = LN x + attend(LN x, x),  out = LN y + feed_forward(LN y),  keys and values of x
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from retreever.cpu.numba_here import plain_floats
from retreever.nn.dropout import keep
from retreever.nn.geglu import gate, gate_backward, gates_again
from retreever.tree.siblings import attend, attend_backward

EPSILON = 1e-5  # of `nn.LayerNorm`
aten = torch.ops.aten


class Weights(NamedTuple):
    """Parameters of the layer; `qkv` makes queries (already scaled by 1 / sqrt(e)), keys and values."""

    norm: Tensor
    norm_bias: Tensor
    qkv: Tensor
    out: Tensor
    out_bias: Tensor
    feed_norm: Tensor
    feed_norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class Form(NamedTuple):
    """What a layer is besides its weights."""

    heads: int
    pre: bool
    dropout: float

    def normed(self, width: int) -> int:
        """How many of the columns of queries, keys and values come from LN x; the others come from x."""
        return 3 * width if self.pre else width


class Kept(NamedTuple):
    """What the way up leaves for the way down: rows of all levels, and the factors of dropout (or nothing)."""

    nodes: Tensor
    qkv: Tensor
    shares: Tensor
    attended: Tensor
    added: Tensor
    up: Tensor
    opened: Tensor | None
    gated: Tensor
    drop_shares: Tensor | None
    drop_fed: Tensor | None


class Level(NamedTuple):
    """One level of children: their rows, those of their parents, the cells of their attention, children per parent.

    Where some are padding: what each child counts in the mean of its family (g, k, 1), and whom nobody attends to
    (g, 1, k, 1).
    """

    rows: slice
    parents: slice
    cells: slice
    children: int
    counts: Tensor | None = None
    hidden: Tensor | None = None


def make_room(leaves: Tensor, top: Level, form: Form, hidden: int) -> Kept:
    """Buffers for all levels, with the leaves in their place and dropout drawn."""
    b, count, d = leaves.shape
    rows, cells, new = top.rows.stop, top.cells.stop, leaves.new_empty
    nodes = new(top.parents.stop, d)
    nodes[: b * count] = leaves.reshape(-1, d)
    up = new(rows, 2 * hidden)
    return Kept(
        nodes,
        new(rows, 3 * d),
        new(cells, form.heads),
        new(rows, d),
        new(rows, d),
        up,
        None if gates_again(up) else new(rows, hidden),
        new(rows, hidden),
        keep((cells, form.heads), form.dropout, nodes) if form.dropout else None,
        keep((rows, d), form.dropout, nodes) if form.dropout else None,
    )


def level_up(kept: Kept, level: Level, w: Weights, form: Form) -> None:
    """One level: what its children are to their parents."""
    rows, x, qkv, added = level.rows, kept.nodes[level.rows], kept.qkv[level.rows], kept.added[level.rows]
    d, split = x.shape[1], form.normed(x.shape[1])
    normed = _normed(x, w.norm, w.norm_bias)
    torch.mm(normed, w.qkv[:split].t(), out=qkv[:, :split])
    if not form.pre:
        torch.mm(x, w.qkv[split:].t(), out=qkv[:, split:])
    attend(*_siblings(kept, level, form.heads), level.hidden, kept.attended[rows])
    if kept.opened is None:
        _feed_up(kept, level, w, form.pre, x if form.pre else normed)
        return
    torch.addmm(w.out_bias, kept.attended[rows], w.out.t(), out=added).add_(x if form.pre else normed)
    fed_normed = normalise(added, w.feed_norm, w.feed_norm_bias)[0]
    torch.addmm(w.up_bias, fed_normed, w.up.t(), out=kept.up[rows])
    gate(kept.up[rows], kept.opened[rows], kept.gated[rows])
    fed = torch.addmm(w.down_bias, kept.gated[rows], w.down.t())
    if kept.drop_fed is not None:
        fed.mul_(kept.drop_fed[rows])
    family = fed.add_(added if form.pre else fed_normed).view(-1, level.children, d)
    if level.counts is None:
        torch.mean(family, dim=1, out=kept.nodes[level.parents])
    else:
        torch.sum(family.mul_(level.counts), dim=1, out=kept.nodes[level.parents])


def _feed_up(kept: Kept, level: Level, w: Weights, pre: bool, residual: Tensor) -> None:
    """The same from the attention on, by kernels for a CPU; `kept.up` lacks its bias."""
    from retreever.cpu.geglu_kernel import gate_rows
    from retreever.cpu.rows_kernel import sum_norm_rows
    from retreever.cpu.siblings_kernel import mean_of_families

    rows, added = level.rows, torch.mm(kept.attended[level.rows], w.out.t(), out=kept.added[level.rows])
    fed_normed = sum_norm_rows(added, w.out_bias, residual, w.feed_norm, w.feed_norm_bias)
    gate_rows(torch.mm(fed_normed, w.up.t(), out=kept.up[rows]), w.up_bias, kept.gated[rows])
    fed, drop = torch.mm(kept.gated[rows], w.down.t()), None if kept.drop_fed is None else kept.drop_fed[rows]
    base = added if pre else fed_normed
    mean_of_families(fed, w.down_bias, drop, base, level.counts, kept.nodes[level.parents])


class Descent:
    """The way down: gradients of the rows of all levels, gathered so that a weight's is one product over all."""

    def __init__(self, kept: Kept, w: Weights, form: Form) -> None:
        self.kept, self.w, self.form = kept, w, form
        self.norm = _Norm(kept.nodes[: len(kept.added)], w.norm, w.norm_bias)
        self.feed_norm = _Norm(kept.added, w.feed_norm, w.feed_norm_bias)
        self.qkv, self.up, self.fed = (x.new_empty(x.shape) for x in (kept.qkv, kept.up, kept.added))
        self.added: list[Tensor] = []  # level after level from the top
        self.up_bias: list[Tensor] = []  # what each level adds to its gradient, from kernels

    def level_down(self, level: Level, above: Tensor, detach: bool) -> Tensor | None:
        """From the gradient of the parents to that of their children, which `detach` cuts."""
        w, heads, pre, rows = self.w, self.form.heads, self.form.pre, level.rows
        split, qkv = self.form.normed(above.shape[1]), self.qkv[rows]
        added = self._feed_down(level, above)
        self.added.append(added)
        attend_backward(*_siblings(self.kept, level, heads), added @ w.out, _heads(qkv, level, heads))
        slope = torch.mm(qkv[:, :split], w.qkv[:split], out=self.norm.slope[rows])
        if not pre:
            slope.add_(added)
        if detach:
            return None
        below = self.norm.down(rows, added if pre else None)
        return below if pre else below.addmm_(qkv[:, split:], w.qkv[split:])

    def _feed_down(self, level: Level, above: Tensor) -> Tensor:
        """From the parents through their mean and the feed-forward block."""
        kept, pre, rows, fed = self.kept, self.form.pre, level.rows, self.fed[level.rows]
        total = fed if kept.drop_fed is None else torch.empty_like(fed)  # of what every child is to its parent
        family = (len(above), level.children, above.shape[1])
        counts = 1 / level.children if level.counts is None else level.counts
        torch.mul(above[:, None].expand(family), counts, out=total.view(family))
        if kept.drop_fed is not None:
            torch.mul(total, kept.drop_fed[rows], out=fed)
        if kept.opened is None:
            from retreever.cpu.geglu_kernel import gate_gradient_rows

            self.up_bias.append(gate_gradient_rows(fed @ self.w.down, kept.up[rows], self.w.up_bias, self.up[rows]))
        else:
            gate_backward(fed @ self.w.down, kept.up[rows], kept.opened[rows], self.up[rows])
        slope = torch.mm(self.up[rows], self.w.up, out=self.feed_norm.slope[rows])
        if not pre:
            slope.add_(total)
        return self.feed_norm.down(rows, total if pre else None)

    def of_weights(self) -> Weights:
        """Each weight's gradient, once all levels are behind."""
        added, split = torch.cat(self.added[::-1]), self.form.normed(self.w.norm.shape[0])
        sources = ((self.qkv[:, :split], self.norm.normed), (self.qkv[:, split:], self.norm.x))
        return Weights(
            *self.norm.of_weights(),
            torch.cat([slope.t() @ source for slope, source in sources]),
            added.t() @ self.kept.attended,
            added.sum(dim=0),
            *self.feed_norm.of_weights(),
            self.up.t() @ self.feed_norm.normed,
            torch.stack(self.up_bias).sum(dim=0) if self.up_bias else self.up.sum(dim=0),
            self.fed.t() @ self.kept.gated,
            self.fed.sum(dim=0),
        )


class _Norm:
    """A layer norm of all rows, made again rather than kept, with room for the gradient of its output."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        self.x, self.weight, self.slope = x, weight, torch.empty_like(x)
        self.sums: list[Tensor] = []  # what the rows so far add to the gradients of weight and bias, from kernels
        self.fused = plain_floats(x)
        if self.fused:
            from retreever.cpu.rows_kernel import sum_norm_rows

            self.normed = sum_norm_rows(x, None, None, weight, bias)
        else:
            self.normed, self.mean, self.scale = normalise(x, weight, bias)

    def down(self, rows: slice, residual: Tensor | None) -> Tensor:
        """Gradient of x in `rows`, plus `residual`."""
        if self.fused:
            from retreever.cpu.rows_kernel import norm_gradient_rows

            below = torch.empty_like(self.slope[rows])
            self.sums.append(norm_gradient_rows(self.slope[rows], self.x[rows], self.weight, residual, below))
        else:
            below = self._backward(rows, [True, False, False])[0]
            below = below if residual is None else below.add_(residual)
        return below

    def of_weights(self) -> tuple[Tensor, Tensor]:
        """Gradients of weight and bias."""
        if not self.fused:
            _, weight, bias = self._backward(slice(None), [False, True, True])
            return weight, bias
        if not self.sums:  # nobody asked for that of x
            self.down(slice(None), None)
        weight, bias, _ = torch.stack(self.sums).sum(dim=0).unbind()
        return weight, bias

    def _backward(self, rows: slice, wanted: list[bool]) -> tuple[Any, ...]:
        weight, width = self.weight, self.x.shape[1:]
        of_rows = (self.slope[rows], self.x[rows], width, self.mean[rows], self.scale[rows])
        slopes: tuple[Any, ...] = aten.native_layer_norm_backward(*of_rows, weight, weight, wanted)
        return slopes


def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LN x, and the mean and scale its gradient needs."""
    normed, mean, scale = aten.native_layer_norm(x, x.shape[-1:], weight, bias, EPSILON)
    return normed, mean, scale


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if plain_floats(x):
        from retreever.cpu.rows_kernel import sum_norm_rows

        return sum_norm_rows(x, None, None, weight, bias)
    return normalise(x, weight, bias)[0]


def _siblings(kept: Kept, level: Level, heads: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of a level: queries, keys and values (g, k, 3, h, e), shares (g, k, k, h) and their dropout."""
    pairs = (-1, level.children, level.children, heads)
    factor = None if kept.drop_shares is None else kept.drop_shares[level.cells].view(pairs)
    return _heads(kept.qkv[level.rows], level, heads), kept.shares[level.cells].view(pairs), factor


def _heads(rows: Tensor, level: Level, heads: int) -> Tensor:
    return rows.view(-1, level.children, 3, heads, rows.shape[1] // (3 * heads))
