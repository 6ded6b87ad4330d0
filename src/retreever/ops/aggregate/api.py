"""`aggregate`: computes the inner nodes of a tree with a fused kernel; `tree.build` has the plain version."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.ops.aggregate.weights import LayerWeights, ProjectionWeights
from retreever.ops.backend import transformed
from retreever.tree.plan import TreePlan

WIDEST, MOST_CHILDREN, NARROWEST_HEAD = 128, 16, 16


def aggregates(plan: TreePlan, weights: LayerWeights, leaves: Float[Tensor, "b leaves d"]) -> bool:
    """Whether the kernel can run on these leaves: no gradients, and sizes that fill tensor-core tiles."""
    if not _infers():
        return False
    dim = leaves.shape[2]
    fills = _is_power(dim) and dim // weights.heads >= NARROWEST_HEAD and dim <= WIDEST and weights.hidden % dim == 0
    alike = all(_alike(tensor, leaves) for tensor in weights.tensors)
    return fills and alike and plan.branch <= MOST_CHILDREN and leaves.numel() > 0


def aggregate(
    leaves: Float[Tensor, "b leaves d"], mask: Bool[Tensor, "b t"] | None, plan: TreePlan, weights: LayerWeights
) -> Float[Tensor, "b t d"]:
    """Nodes of all levels: a transformer layer among siblings, then their mean; `aggregates` must be True."""
    from retreever.ops.aggregate.launch_triton import aggregate_triton

    nodes = leaves.new_empty(leaves.shape[0], plan.nodes, leaves.shape[2])
    nodes[:, plan.leaf_offset :] = leaves
    aggregate_triton(nodes, mask, plan, weights)
    return nodes


def projects(tokens: Float[Tensor, "b t d"], weights: ProjectionWeights) -> bool:
    """Whether the kernel can make keys and values of these tokens: no gradients, and sizes that fill its tiles."""
    width, dim = weights.to_kv.shape
    fills = _is_power(dim) and 16 <= dim <= WIDEST and _is_power(width) and width >= 16
    return _infers() and fills and tokens.numel() > 0 and all(_alike(tensor, tokens) for tensor in weights)


def project(tokens: Float[Tensor, "b t d"], weights: ProjectionWeights) -> Float[Tensor, "b t c"]:
    """Keys and values of all tokens, side by side; `projects` must be True."""
    from retreever.ops.aggregate.project_triton import project_triton

    return project_triton(tokens.contiguous(), weights)


def _infers() -> bool:
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed())


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0


def _alike(weight: Tensor, leaves: Tensor) -> bool:
    return weight.dtype == leaves.dtype and weight.device == leaves.device and weight.is_contiguous()
