"""All levels of the transformer aggregator as one differentiable step, for training.

Level by level torch would make the gradient of every weight once per level, in small products, and add them up. Here
the rows of all levels lie in common buffers, level after level from the leaves up, so that a weight's gradient is a
single product over all of them; only the gradient of the nodes goes down level by level. Dropout of all levels comes
out of one draw. What is cheap to make again, the norms, is not kept.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from retreever.cpu.numba_here import numba_runs
from retreever.cpu.one_thread import one_thread
from retreever.cpu.team import row_parts
from retreever.nn import fused_block
from retreever.nn.blocks import FEW, AttentionBlock
from retreever.nn.dropout import keep
from retreever.nn.geglu import gates_again
from retreever.tree.level import Descent, Form, Kept, Level, Weights, level_up
from retreever.tree.plan import TreePlan

# More nodes than these no longer fit a CPU's cache: there a level at a time, forgotten on the way, is quicker. Kernels,
# which go over them less often, do well with more.
CPU_ROWS, KERNEL_ROWS = 2048, 1 << 15
FEW_ROWS = 512  # up to here one thread is through with a level before a second one has woken up
Masks = list[Bool[Tensor, "b _"]] | None  # each level has its own number of nodes


def fits(layer: AttentionBlock, plan: TreePlan, leaves: Tensor) -> bool:
    """Whether training goes this way: a gradient is wanted, nobody needs the single steps, families are small."""
    wanted = torch.is_grad_enabled() and (leaves.requires_grad or layer.to_q.weight.requires_grad)
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    covered = (layer.residual, layer.shared_norm) in (("pre", True), ("normalised", False))
    covered = covered and layer.context_norm is None and layer.feed_forward is not None and layer.to_q.bias is None
    covered = covered and plan.depth > 0 and plan.branch**2 <= FEW and leaves.numel() > 0
    covered = covered and (not leaves.is_cpu or _quick_on_cpu(layer, len(leaves) * plan.nodes))
    return wanted and covered and not torch.is_autocast_enabled(leaves.device.type)


def _quick_on_cpu(layer: AttentionBlock, rows: int) -> bool:
    """In training alone: kernels round differently, and elsewhere the bits are the same with and without gradients."""
    return layer.training and rows <= (KERNEL_ROWS if numba_runs() else CPU_ROWS)


def ascend(
    layer: AttentionBlock, plan: TreePlan, leaves: Float[Tensor, "b leaves d"], masks: Masks, detach: bool
) -> Float[Tensor, "b t d"]:
    """The nodes of all levels over `leaves`; `masks` say which nodes are real, level by level from the leaves up."""
    feed: Any = layer.feed_forward
    qkv = torch.cat([layer.to_q.weight * layer.width**-0.5, layer.to_kv.weight])
    parts: tuple[Any, ...] = (layer.norm, layer.to_out, layer.feed_norm, feed.up, feed.down)
    norm, *others = ((part.weight, part.bias) for part in parts)
    weights = [*norm, qkv, *(weight for pair in others for weight in pair)]
    form = Form(layer.heads, layer.residual == "pre", layer.dropout if layer.training else 0.0)
    function: Any = _Ascent
    if _fused(layer, plan, leaves):
        from retreever.tree.fused_ascent import FusedAscent

        function = FusedAscent
    elif len(shares := row_parts(len(leaves), leaves, plan.nodes)) > 1:
        return _shared(plan, leaves, masks, shares, form, detach, weights)
    nodes: Tensor = function.apply(leaves, levels_of(plan, leaves, masks), form, detach, *weights)
    return nodes


def _shared(
    plan: TreePlan, leaves: Tensor, masks: Masks, shares: list[slice], form: Form, detach: bool, weights: list[Tensor]
) -> Tensor:
    """By several threads of a CPU, which share the batch."""
    from retreever.tree.cpu_ascent import SharedAscent

    of_shares = ([mask[share] for mask in masks] if masks is not None else None for share in shares)
    levels = [levels_of(plan, leaves[share], real) for share, real in zip(shares, of_shares, strict=True)]
    function: Any = SharedAscent
    nodes: Tensor = function.apply(leaves, shares, levels, form, detach, *weights)
    return nodes


def _fused(layer: AttentionBlock, plan: TreePlan, leaves: Tensor) -> bool:
    """Whether fused kernels climb: on CUDA, where families fill tiles."""
    return all(size & (size - 1) == 0 for size in (plan.branch, plan.block)) and fused_block.fits(layer, leaves)


class _Ascent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: Tensor, levels: list[Level], form: Form, detach: bool, *w: Tensor) -> Tensor:
        b, _, d = leaves.shape
        ctx.levels, ctx.form, ctx.detach = levels, form, detach
        kept = make_room(leaves, levels[-1], form, w[-2].shape[1])
        for level in ctx.levels:
            with _alone(level, leaves):
                level_up(kept, level, Weights(*w), form)
        ctx.save_for_backward(*kept, *w)
        down = [*(level.parents for level in reversed(ctx.levels)), ctx.levels[0].rows]
        parts = [kept.nodes[rows].view(b, -1, d) for rows in down]
        ctx.sizes = [part.shape[1] for part in parts]
        return torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        count = len(Kept._fields)
        descent = Descent(Kept(*ctx.saved_tensors[:count]), Weights(*ctx.saved_tensors[count:]), ctx.form)
        *tops, leaves = grad.split_with_sizes(ctx.sizes, dim=1)
        below = None  # the gradient that the level above hands down to its children
        for level, top in zip(reversed(ctx.levels), tops, strict=True):
            with _alone(level, grad):
                below = descent.level_down(level, total_of(top, below).reshape(-1, grad.shape[2]), ctx.detach)
        leaves = total_of(leaves, below)
        return leaves, None, None, None, *descent.of_weights()


def _alone(level: Level, like: Tensor) -> AbstractContextManager[None]:
    return one_thread(like.is_cpu and level.rows.stop - level.rows.start <= FEW_ROWS)


def total_of(own: Tensor, below: Tensor | None) -> Tensor:
    """A level's own gradient and what comes from the level above it, where something does."""
    return own if below is None else below.view(own.shape).add_(own)


def levels_of(plan: TreePlan, leaves: Tensor, masks: Masks) -> list[Level]:
    """All levels of children, from the leaves up."""
    levels, start, cell, nodes, children = [], 0, 0, plan.leaves, plan.block
    for index in range(plan.depth):
        stop, parents, cells = start + len(leaves) * nodes, nodes // children, len(leaves) * nodes * children
        families = () if masks is None else _padding(masks[index], masks[index + 1], children, leaves.dtype)
        rows, above = slice(start, stop), slice(stop, stop + len(leaves) * parents)
        levels.append(Level(rows, above, slice(cell, cell + cells), children, *families))
        start, cell, nodes, children = stop, cell + cells, parents, plan.branch
    return levels


def _padding(real: Tensor, parents: Tensor, children: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a level with padding: `counts` and `hidden`. A family of padding alone sees itself, and counts nothing."""
    real = real.reshape(-1, children)
    counts = real / real.sum(dim=1, keepdim=True, dtype=dtype).clamp_min_(1)
    return counts[..., None], (parents.reshape(-1, 1) > real)[:, None, :, None]


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
