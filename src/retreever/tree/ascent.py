"""All levels of the transformer aggregator as one differentiable step, for training.

Level by level torch would make the gradient of every weight once per level, in small products, and add them up. Here
the rows of all levels lie in common buffers, level after level from the leaves up, so that a weight's gradient is a
single product over all of them; only the gradient of the nodes goes down level by level. Queries, keys and values come
out of one product, dropout of all levels out of one draw. What is cheap to make again, the norms, is not kept.

The layer is that of `self_attention_block(residual="pre")`: y = x + attend(LN x), out = y + feed_forward(LN y).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from retreever.nn.blocks import FEW, AttentionBlock
from retreever.nn.dropout import keep
from retreever.nn.geglu import gate, gate_backward
from retreever.tree.plan import TreePlan
from retreever.tree.siblings import attend, attend_backward

Masks = list[Bool[Tensor, "b _"]] | None  # each level has its own number of nodes
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


class Kept(NamedTuple):
    """What the way up leaves for the way down: rows of all levels, and the factors of dropout (or nothing)."""

    nodes: Tensor
    qkv: Tensor
    shares: Tensor
    attended: Tensor
    added: Tensor
    up: Tensor
    opened: Tensor
    gated: Tensor
    drop_shares: Tensor | None
    drop_fed: Tensor | None


class Level(NamedTuple):
    """One level of children: their rows, those of their parents, the cells of their attention, children per parent."""

    rows: slice
    parents: slice
    cells: slice
    children: int


def fits(layer: AttentionBlock, plan: TreePlan, leaves: Tensor) -> bool:
    """Whether training may go this way: a gradient is wanted, nobody needs the single steps, and families are small."""
    wanted = torch.is_grad_enabled() and (leaves.requires_grad or layer.to_q.weight.requires_grad)
    watched = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    covered = layer.residual == "pre" and layer.feed_forward is not None and layer.to_q.bias is None
    covered = covered and plan.depth > 0 and plan.branch**2 <= FEW and leaves.numel() > 0
    return wanted and covered and not watched and not torch.is_autocast_enabled(leaves.device.type)


def ascend(
    layer: AttentionBlock, plan: TreePlan, leaves: Float[Tensor, "b leaves d"], masks: Masks, detach: bool
) -> Float[Tensor, "b t d"]:
    """The nodes of all levels over `leaves`; `masks` say which nodes are real, level by level from the leaves up."""
    feed: Any = layer.feed_forward
    qkv = torch.cat([layer.to_q.weight * layer.width**-0.5, layer.to_kv.weight])
    parts: tuple[Any, ...] = (layer.norm, layer.to_out, layer.feed_norm, feed.up, feed.down)
    norm, *others = ((part.weight, part.bias) for part in parts)
    weights = [*norm, qkv, *(weight for pair in others for weight in pair)]
    dropout = layer.dropout if layer.training else 0.0
    function: Any = _Ascent
    nodes: Tensor = function.apply(leaves, plan, masks, layer.heads, dropout, detach, *weights)
    return nodes


class _Ascent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, leaves: Tensor, plan: TreePlan, masks: Masks, heads: int, dropout: float, detach: bool, *w: Tensor
    ) -> Tensor:
        b, _, d = leaves.shape
        ctx.levels, ctx.masks, ctx.heads, ctx.detach = levels_of(plan, b), masks, heads, detach
        kept = _make_room(plan, leaves, ctx.levels, heads, w[-2].shape[1], dropout)
        for index, level in enumerate(ctx.levels):
            _level_up(kept, level, _families(masks, index, level), Weights(*w), heads)
        ctx.save_for_backward(*kept, *w)
        tops = [level.parents for level in reversed(ctx.levels)]
        return torch.cat([kept.nodes[rows].view(b, -1, d) for rows in (*tops, slice(b * plan.leaves))], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kept = Kept(*ctx.saved_tensors[: len(Kept._fields)])
        w = Weights(*ctx.saved_tensors[len(Kept._fields) :])
        slopes = _Slopes(kept, w)
        start, below = 0, None  # the gradient that the level above hands down to its children
        for index in range(len(ctx.levels) - 1, -1, -1):
            level = ctx.levels[index]
            stop = start + (level.parents.stop - level.parents.start) // len(grad)
            above = grad[:, start:stop].reshape(-1, grad.shape[2])
            above = above if below is None else below.add_(above)
            below = _level_down(
                slopes, kept, level, _families(ctx.masks, index, level), w, ctx.heads, above, ctx.detach
            )
            start = stop
        leaves = grad[:, start:]
        leaves = leaves if below is None else below.view(leaves.shape).add_(leaves)
        return leaves, None, None, None, None, None, *slopes.of_weights(kept, w)


def levels_of(plan: TreePlan, b: int) -> list[Level]:
    """All levels of children, from the leaves up."""
    levels, start, cell, nodes, children = [], 0, 0, plan.leaves, plan.block
    for _ in range(plan.depth):
        stop, parents, cells = start + b * nodes, nodes // children, b * nodes * children
        levels.append(Level(slice(start, stop), slice(stop, stop + b * parents), slice(cell, cell + cells), children))
        start, cell, nodes, children = stop, cell + cells, parents, plan.branch
    return levels


def _families(masks: Masks, index: int, level: Level) -> Tensor | None:
    return None if masks is None else masks[index].reshape(-1, level.children)


def _make_room(plan: TreePlan, leaves: Tensor, levels: list[Level], heads: int, hidden: int, dropout: float) -> Kept:
    b, _, d = leaves.shape
    rows, cells, new = levels[-1].rows.stop, levels[-1].cells.stop, leaves.new_empty
    nodes = new(b * plan.nodes, d)
    nodes[: b * plan.leaves] = leaves.reshape(-1, d)
    return Kept(
        nodes,
        new(rows, 3 * d),
        new(cells, heads),
        new(rows, d),
        new(rows, d),
        new(rows, 2 * hidden),
        new(rows, hidden),
        new(rows, hidden),
        keep((cells, heads), dropout, nodes) if dropout else None,
        keep((rows, d), dropout, nodes) if dropout else None,
    )


def _normalise(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LN x, and the mean and scale its gradient needs."""
    normed, mean, scale = aten.native_layer_norm(x, x.shape[-1:], weight, bias, EPSILON)
    return normed, mean, scale


def _level_up(kept: Kept, level: Level, mask: Tensor | None, w: Weights, heads: int) -> None:
    """One level: what its children are to their parents."""
    rows, k = level.rows, level.children
    x, added, up = kept.nodes[rows], kept.added[rows], kept.up[rows]
    torch.mm(_normalise(x, w.norm, w.norm_bias)[0], w.qkv.t(), out=kept.qkv[rows])
    attend(*_siblings(kept, level, heads), mask, kept.attended[rows])
    torch.addmm(w.out_bias, kept.attended[rows], w.out.t(), out=added).add_(x)
    torch.addmm(w.up_bias, _normalise(added, w.feed_norm, w.feed_norm_bias)[0], w.up.t(), out=up)
    gate(up, kept.opened[rows], kept.gated[rows])
    fed = torch.addmm(w.down_bias, kept.gated[rows], w.down.t())
    if kept.drop_fed is not None:
        fed.mul_(kept.drop_fed[rows])
    family = fed.add_(added).view(-1, k, x.shape[1])
    parents = kept.nodes[level.parents]
    if mask is None:
        torch.mean(family, dim=1, out=parents)
    else:
        torch.sum(family.masked_fill_(~mask[..., None], 0), dim=1, out=parents)
        parents.div_(mask.sum(dim=1, keepdim=True).clamp_min(1))


def _level_down(
    slopes: _Slopes, kept: Kept, level: Level, mask: Tensor | None, w: Weights, heads: int, above: Tensor, detach: bool
) -> Tensor | None:
    """From the gradient of the parents to those of their children; what the weights need stays in `slopes`."""
    rows, family = level.rows, (len(above), level.children, above.shape[1])
    share = above / (level.children if mask is None else mask.sum(dim=1, keepdim=True).clamp_min(1))
    total = share[:, None].expand(family)  # every child has the same share in the mean
    total = total if mask is None else total * mask[..., None]
    fed, added = slopes.fed[rows], slopes.added[rows]
    if kept.drop_fed is None:
        fed.view(family).copy_(total)
    else:
        torch.mul(total, kept.drop_fed[rows].view(family), out=fed.view(family))
    gate_backward(fed @ w.down, kept.up[rows], kept.opened[rows], slopes.up[rows])
    torch.mm(slopes.up[rows], w.up, out=slopes.feed_normed[rows])
    through = slopes.through_norm(slopes.feed_normed, kept.added, slopes.of_added, w.feed_norm, rows)
    torch.add(total, through.view(family), out=added.view(family))
    attend_backward(*_siblings(kept, level, heads), added @ w.out, _heads(slopes.qkv, level, heads))
    torch.mm(slopes.qkv[rows], w.qkv, out=slopes.normed[rows])
    return None if detach else slopes.through_norm(slopes.normed, kept.nodes, slopes.of_nodes, w.norm, rows).add_(added)


class _Slopes:
    """Gradients of the rows of all levels, gathered for those of the weights; and the norms, made again."""

    def __init__(self, kept: Kept, w: Weights) -> None:
        def like(x: Tensor) -> Tensor:
            return x.new_empty(x.shape)

        self.qkv, self.added, self.up, self.fed = (like(x) for x in (kept.qkv, kept.added, kept.up, kept.added))
        self.normed, self.feed_normed = like(kept.added), like(kept.added)
        self.of_nodes = _normalise(kept.nodes[: len(kept.added)], w.norm, w.norm_bias)
        self.of_added = _normalise(kept.added, w.feed_norm, w.feed_norm_bias)

    @staticmethod
    def through_norm(
        grad: Tensor, x: Tensor, norm: tuple[Tensor, Tensor, Tensor], weight: Tensor, rows: slice
    ) -> Tensor:
        """Gradient of `x` from that of LN x, in `rows` alone."""
        _, mean, scale = norm
        into, _, _ = aten.native_layer_norm_backward(
            grad[rows], x[rows], x.shape[-1:], mean[rows], scale[rows], weight, weight, [True, False, False]
        )
        result: Tensor = into
        return result

    def of_weights(self, kept: Kept, w: Weights) -> Weights:
        """Each weight's gradient as one product over all levels."""
        nodes = kept.nodes[: len(kept.added)]
        return Weights(
            *self._of_norm(self.normed, nodes, self.of_nodes, w.norm),
            self.qkv.t() @ self.of_nodes[0],
            self.added.t() @ kept.attended,
            self.added.sum(dim=0),
            *self._of_norm(self.feed_normed, kept.added, self.of_added, w.feed_norm),
            self.up.t() @ self.of_added[0],
            self.up.sum(dim=0),
            self.fed.t() @ kept.gated,
            self.fed.sum(dim=0),
        )

    @staticmethod
    def _of_norm(grad: Tensor, x: Tensor, norm: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, scale = norm
        slopes = aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, scale, weight, weight, [False, True, True]
        )
        return slopes[1], slopes[2]


def _siblings(kept: Kept, level: Level, heads: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of a level: queries, keys and values (g, k, 3, h, e), shares (g, k, k, h) and their dropout."""
    pairs = (-1, level.children, level.children, heads)
    factor = None if kept.drop_shares is None else kept.drop_shares[level.cells].view(pairs)
    return _heads(kept.qkv, level, heads), kept.shares[level.cells].view(pairs), factor


def _heads(rows: Tensor, level: Level, heads: int) -> Tensor:
    return rows[level.rows].view(-1, level.children, 3, heads, rows.shape[1] // (3 * heads))
