"""One level of the transformer aggregator by fused kernels on CUDA, up and down; `climb` goes up a tree with it.

Three launches a level on the way up and three on the way down, instead of some forty; the gradients of all weights
come from four launches over the rows of all levels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from retreever.nn.block_kernel import finish_gradients, finish_rows, project_gradients, project_rows
from retreever.nn.dropout import keep
from retreever.nn.fused_block import UNITS, launch
from retreever.nn.weight_kernel import weight_gradients
from retreever.tree.families_kernel import attend, attend_backward
from retreever.tree.level import EPSILON, Form, Level, Weights


class Kept(NamedTuple):
    """What the way up leaves for the way down: rows of all levels, and the factors of dropout (or nothing)."""

    nodes: Tensor
    normed: Tensor
    qkv: Tensor
    shares: Tensor
    attended: Tensor
    added: Tensor
    drop_shares: Tensor | None
    drop_fed: Tensor | None

    def cells(self, level: Level) -> tuple[Tensor, Tensor | None]:
        """Shares of a level, and their dropout."""
        return self.shares[level.cells], None if self.drop_shares is None else self.drop_shares[level.cells]


def make_room(leaves: Tensor, top: Level, form: Form, _hidden: int) -> Kept:
    """Buffers for all levels, with the leaves in their place and dropout drawn."""
    b, count, d = leaves.shape
    rows, cells, new = top.rows.stop, top.cells.stop, leaves.new_empty
    nodes = new(top.parents.stop, d)
    nodes[: b * count] = leaves.reshape(-1, d)
    drops = [keep(size, form.dropout, nodes) if form.dropout else None for size in ((cells, form.heads), (rows, d))]
    return Kept(nodes, new(rows, d), new(rows, 3 * d), new(cells, form.heads), new(rows, d), new(rows, d), *drops)


def level_up(kept: Kept, level: Level, w: Weights, form: Form) -> None:
    """One level: what its children are to their parents."""
    rows, d = level.rows, kept.nodes.shape[1]
    x, normed, qkv, attended = (part[rows] for part in (kept.nodes, kept.normed, kept.qkv, kept.attended))
    grid, shared = launch(x)
    project_rows[grid](
        x, w.norm, w.norm_bias, w.qkv, w.qkv[d:], normed, qkv, qkv[:, d:], len(x), EPSILON, SHARED=form.pre,
        Q_STRIDE=3 * d, KV_STRIDE=3 * d, **shared,
    )  # fmt: skip
    shares, drop = kept.cells(level)
    attend(qkv, shares, drop, level.hidden, attended, level.children, form.heads)
    finish_rows[grid](
        attended, x if form.pre else normed, _rows(kept.drop_fed, rows), level.counts, *w[3:], kept.added[rows],
        kept.nodes[level.parents], len(x), EPSILON, **_flags(kept, level, w, form), **shared,
    )  # fmt: skip


class Descent:
    """The way down: gradients of the rows of all levels, gathered so that a weight's is one product over all."""

    def __init__(self, kept: Kept, w: Weights, form: Form) -> None:
        self.kept, self.w, self.form = kept, w, form
        rows, d = kept.added.shape
        hidden, new = w.down.shape[1], kept.added.new_empty
        self.added, self.fed, self.normed = new(rows, d), new(rows, d), new(rows, d)
        self.up, self.gated, self.qkv = new(rows, 2 * hidden), new(rows, hidden), new(rows, 3 * d)
        self.sums: list[Tensor] = []  # of every level: programs x (feed-forward norm, norm) x (weight, bias)

    def level_down(self, level: Level, above: Tensor, detach: bool) -> Tensor | None:
        """From the gradient of the parents to that of their children, which `detach` cuts."""
        kept, w, form, rows = self.kept, self.w, self.form, level.rows
        x, d = kept.nodes[rows], above.shape[1]
        grid, shared = launch(x)
        attended, below, sums = torch.empty_like(x), torch.empty_like(x), x.new_empty(2, *grid, 2, d)
        finish_gradients[grid](
            above, kept.added[rows], _rows(kept.drop_fed, rows), level.counts, w.out, w.feed_norm, w.feed_norm_bias,
            w.up, w.up_bias, w.down, self.added[rows], attended, self.fed[rows], self.up[rows], self.normed[rows],
            self.gated[rows], sums[0], len(x), EPSILON, **_flags(kept, level, w, form), **shared,
        )  # fmt: skip
        qkv, (shares, drop) = self.qkv[rows], kept.cells(level)
        attend_backward(kept.qkv[rows], shares, drop, attended, qkv, level.children, form.heads)
        project_gradients[grid](
            x, w.norm, w.qkv, w.qkv[d:], self.added[rows], qkv, qkv[:, d:], qkv[:, 2 * d :], below, None, sums[1],
            len(x), EPSILON, SHARED=form.pre, EXTRA="x" if form.pre else "normed", STRIDE=3 * d, KEEP=False, **shared,
        )  # fmt: skip
        self.sums.append(sums)
        return None if detach else below

    def of_weights(self) -> Weights:
        """Each weight's gradient, once all levels are behind."""
        kept, d = self.kept, self.kept.added.shape[1]
        x = kept.normed if self.form.pre else kept.nodes[: len(kept.normed)]
        q, kv = weight_gradients([(self.qkv[:, :d], kept.normed, False), (self.qkv[:, d:], x, False)])
        pairs = ((self.added, kept.attended), (self.up, self.normed), (self.fed, self.gated))
        out, out_b, up, up_b, down, down_b = weight_gradients([(slope, source, True) for slope, source in pairs])
        (feed_norm, feed_norm_b), (norm, norm_b) = torch.cat(self.sums, dim=1).sum(dim=1)
        qkv = torch.cat([q, kv])
        return Weights(norm, norm_b, qkv, out, out_b, feed_norm, feed_norm_b, up, up_b, down, down_b)


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _flags(kept: Kept, level: Level, w: Weights, form: Form) -> dict[str, Any]:
    """What `finish_rows` and `finish_gradients` are told about a level."""
    return {
        "H": w.down.shape[1], "PRE": form.pre, "DROP": kept.drop_fed is not None, "FAMILY": level.children,
        "COUNTS": level.counts is not None, "UNITS": UNITS,
    }  # fmt: skip
