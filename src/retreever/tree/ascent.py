"""All levels of the transformer aggregator as one differentiable step, for training.

Level by level torch would make the gradient of every weight once per level, in small products, and add them up. Here
the rows of all levels lie in common buffers, level after level from the leaves up, so that a weight's gradient is a
single product over all of them; only the gradient of the nodes goes down level by level. Dropout of all levels comes
out of one draw. What is cheap to make again, the norms, is not kept.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.cpu.numba_here import numba_runs
from retreever.cpu.team import row_parts
from retreever.nn import fused_block
from retreever.nn.blocks import FEW, AttentionBlock
from retreever.tree import level
from retreever.tree.climb import Climb
from retreever.tree.level import Form, Level
from retreever.tree.plan import TreePlan

# More nodes than these no longer fit a CPU's cache: there a level at a time, forgotten on the way, is quicker. Kernels,
# which go over them less often, do well with more.
CPU_ROWS, KERNEL_ROWS = 2048, 1 << 15
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
    layers: tuple[Any, ...] = (layer.norm, layer.to_out, layer.feed_norm, feed.up, feed.down)
    norm, *others = ((each.weight, each.bias) for each in layers)
    weights = [*norm, qkv, *(weight for pair in others for weight in pair)]
    form = Form(layer.heads, layer.residual == "pre", layer.dropout if layer.training else 0.0)
    fused = _fused(layer, plan, leaves)
    steps = import_module("retreever.tree.fused_level") if fused else level
    parts = row_parts(len(leaves), leaves, plan.nodes)
    levels = [levels_of(plan, leaves[part], None if masks is None else [m[part] for m in masks]) for part in parts]
    function: Any = Climb
    nodes: Tensor = function.apply(leaves, parts, levels, steps, form, detach, *weights)
    return nodes


def _fused(layer: AttentionBlock, plan: TreePlan, leaves: Tensor) -> bool:
    """Whether fused kernels climb: on CUDA, where families fill tiles."""
    return all(size & (size - 1) == 0 for size in (plan.branch, plan.block)) and fused_block.fits(layer, leaves)


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
