"""Up a tree and down again as one differentiable function; how a level is done is the business of `steps`.

`steps` is `level` (torch, with kernels for a CPU) or `fused_level` (CUDA): `make_room`, `level_up` and `Descent`. On a
CPU a few threads can each climb the trees of their part of the batch, from leaves to top by themselves.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from retreever.cpu.one_thread import one_thread
from retreever.cpu.team import share_out
from retreever.tree.level import Form, Level, Weights

FEW_ROWS = 512  # up to here one thread is through with a level before a second one has woken up
Nodes = Float[Tensor, "b t d"]


class Climb(torch.autograd.Function):
    """The nodes of all levels over the leaves; `levels` are those of each part of the batch, from the leaves up."""

    @staticmethod
    def forward(
        ctx: Any,
        leaves: Float[Tensor, "b leaves d"],
        parts: list[slice],
        levels: list[list[Level]],
        steps: ModuleType,
        form: Form,
        detach: bool,
        *w: Tensor,
    ) -> Nodes:
        """Every part at the same time; what dropout draws is drawn before, in order."""
        ctx.parts, ctx.levels, ctx.steps, ctx.form, ctx.detach = parts, levels, steps, form, detach
        pairs = zip(parts, levels, strict=True)
        kept = [steps.make_room(leaves[part], each[-1], form, w[-2].shape[1]) for part, each in pairs]
        above = sum(level.parents.stop - level.parents.start for each in levels for level in each) // len(leaves)
        nodes = leaves.new_empty(len(leaves), above + leaves.shape[1], leaves.shape[2])

        def climb(i: int) -> None:
            for level in levels[i]:
                with one_thread(leaves.is_cpu and level.rows.stop - level.rows.start <= FEW_ROWS):
                    steps.level_up(kept[i], level, Weights(*w), form)
            _lay_out(kept[i].nodes, levels[i], nodes[parts[i]])

        share_out(climb, range(len(parts)))
        ctx.save_for_backward(*w, *(tensor for part in kept for tensor in part))
        return nodes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Nodes) -> tuple[Any, ...]:
        """Every part at the same time, then the sum of what they add to the gradients of the weights."""
        width, count = len(Weights._fields), len(ctx.steps.Kept._fields)
        w, saved = Weights(*ctx.saved_tensors[:width]), ctx.saved_tensors[width:]

        def descend(i: int) -> tuple[Tensor, Weights]:
            kept = ctx.steps.Kept(*saved[i * count : (i + 1) * count])
            return _descend(ctx.steps.Descent(kept, w, ctx.form), ctx.levels[i], grad[ctx.parts[i]], ctx.detach)

        leaves, slopes = zip(*share_out(descend, range(len(ctx.parts))), strict=True)
        if len(leaves) == 1:
            return leaves[0], None, None, None, None, None, *slopes[0]
        weights = (torch.stack(each).sum(dim=0) for each in zip(*slopes, strict=True))
        return torch.cat(leaves), None, None, None, None, None, *weights


def _lay_out(rows: Float[Tensor, "r d"], levels: list[Level], nodes: Nodes) -> None:
    """All levels, from the top down, into `nodes`."""
    down = [*(level.parents for level in reversed(levels)), levels[0].rows]
    parts = [rows[part].view(len(nodes), -1, rows.shape[1]) for part in down]
    torch.cat(parts, dim=1, out=nodes)


def _descend(descent: Any, levels: list[Level], grad: Nodes, detach: bool) -> tuple[Tensor, Weights]:
    """The gradients of the leaves and of all weights."""
    sizes = [(level.parents.stop - level.parents.start) // len(grad) for level in reversed(levels)]
    *tops, leaves = grad.split_with_sizes([*sizes, grad.shape[1] - sum(sizes)], dim=1)
    below = None  # the gradient that the level above hands down to its children
    for level, top in zip(reversed(levels), tops, strict=True):
        with one_thread(grad.is_cpu and level.rows.stop - level.rows.start <= FEW_ROWS):
            below = descent.level_down(level, _total(top, below).reshape(-1, grad.shape[2]), detach)
    return _total(leaves, below), descent.of_weights()


def _total(own: Tensor, below: Tensor | None) -> Tensor:
    """A level's own gradient and what comes from the level above it, where something does."""
    return own if below is None else below.view(own.shape).add_(own)
