"""`ascent` on a CPU with few threads: each climbs the trees of its part of the batch, from leaves to top by itself."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from retreever.cpu.team import share_out
from retreever.tree.ascent import make_room, total_of
from retreever.tree.level import Descent, Form, Kept, Level, Weights, level_up


class SharedAscent(torch.autograd.Function):
    """The nodes of all levels over the leaves; `levels` are those of each part."""

    @staticmethod
    def forward(
        ctx: Any, leaves: Tensor, parts: list[slice], levels: list[list[Level]], form: Form, detach: bool, *w: Tensor
    ) -> Tensor:
        """Every part at the same time; what dropout draws is drawn before, in order."""
        ctx.parts, ctx.levels, ctx.form, ctx.detach = parts, levels, form, detach
        kept = [
            make_room(leaves[part], each[-1], form, w[-2].shape[1]) for part, each in zip(parts, levels, strict=True)
        ]
        above = sum(level.parents.stop - level.parents.start for each in levels for level in each) // len(leaves)
        nodes = leaves.new_empty(len(leaves), above + leaves.shape[1], leaves.shape[2])
        share_out(lambda i: _climb(kept[i], levels[i], Weights(*w), form, nodes[parts[i]]), range(len(parts)))
        ctx.save_for_backward(*w, *(tensor for part in kept for tensor in part))
        return nodes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Every part at the same time, then the sum of what they add to the gradients of the weights."""
        width, count = len(Weights._fields), len(Kept._fields)
        w, saved = Weights(*ctx.saved_tensors[:width]), ctx.saved_tensors[width:]

        def descend(i: int) -> tuple[Tensor, Weights]:
            descent = Descent(Kept(*saved[i * count : (i + 1) * count]), w, ctx.form)
            return _climb_down(descent, ctx.levels[i], grad[ctx.parts[i]], ctx.detach)

        leaves, slopes = zip(*share_out(descend, range(len(ctx.parts))), strict=True)
        weights = (torch.stack(each).sum(dim=0) for each in zip(*slopes, strict=True))
        return torch.cat(leaves), None, None, None, None, *weights


def _climb(kept: Kept, levels: list[Level], w: Weights, form: Form, nodes: Float[Tensor, "b t d"]) -> None:
    """From the leaves to the top; then lay all levels, from the top down, into `nodes`."""
    for level in levels:
        level_up(kept, level, w, form)
    start, shape = 0, (len(nodes), -1, nodes.shape[2])
    for rows in [*(level.parents for level in reversed(levels)), levels[0].rows]:
        part = kept.nodes[rows].view(shape)
        nodes[:, start : start + part.shape[1]] = part
        start += part.shape[1]


def _climb_down(
    descent: Descent, levels: list[Level], grad: Float[Tensor, "b t d"], detach: bool
) -> tuple[Float[Tensor, "b leaves d"], Weights]:
    """The gradients of the leaves and of all weights."""
    sizes = [(level.parents.stop - level.parents.start) // len(grad) for level in reversed(levels)]
    *tops, leaves = grad.split_with_sizes([*sizes, grad.shape[1] - sum(sizes)], dim=1)
    below = None  # the gradient that the level above hands down to its children
    for level, top in zip(reversed(levels), tops, strict=True):
        below = descent.level_down(level, total_of(top, below).reshape(-1, grad.shape[2]), detach)
    return total_of(leaves, below), descent.of_weights()
