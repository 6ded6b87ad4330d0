"""Inner nodes of a tree by fused kernels, all of them or those on one way up; `tree` has the plain versions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.ops.aggregate.weights import LayerWeights, ProjectionWeights
from retreever.ops.backend import Impl, transformed
from retreever.tree.plan import TreePlan

WIDEST, MOST_CHILDREN, NARROWEST_HEAD = 128, 16, 16


def aggregates(plan: TreePlan, weights: LayerWeights, leaves: Float[Tensor, "b leaves d"]) -> bool:
    """Whether the kernel can run on these leaves: no gradients, and sizes that fill tensor-core tiles."""
    if not _infers():
        return False
    alike = all(_alike(tensor, leaves) for tensor in weights.tensors)
    return _fills(weights, leaves.shape[2]) and alike and plan.branch <= MOST_CHILDREN and leaves.numel() > 0


def _fills(weights: LayerWeights, dim: int) -> bool:
    """Whether sizes fill tensor-core tiles."""
    wide = dim // weights.heads >= NARROWEST_HEAD and dim <= WIDEST
    return wide and _is_power(dim) and weights.hidden % dim == 0


def aggregate(
    leaves: Float[Tensor, "b leaves d"], mask: Bool[Tensor, "b t"] | None, plan: TreePlan, weights: LayerWeights
) -> Float[Tensor, "b t d"]:
    """Nodes of all levels: a transformer layer among siblings, then their mean; `aggregates` must be True."""
    from retreever.ops.aggregate.launch_triton import aggregate_triton

    nodes = leaves.new_empty(leaves.shape[0], plan.nodes, leaves.shape[2])
    nodes[:, plan.leaf_offset :] = leaves
    aggregate_triton(nodes, mask, plan, weights)
    return nodes


def climbs(backend: Impl, plan: TreePlan, weights: LayerWeights, nodes: Float[Tensor, "b t d"], slots: int) -> bool:
    """Whether a backend has a kernel for the nodes above `slots` neighbouring leaf slots: no gradients, and few."""
    if not (_infers() and nodes.is_contiguous() and all(_alike(tensor, nodes) for tensor in weights.tensors)):
        return False
    if backend == "numba":
        return slots == 1
    return slots <= plan.branch + 1 and plan.branch <= MOST_CHILDREN and _fills(weights, nodes.shape[2])


def climb(
    backend: Impl,
    nodes: Float[Tensor, "b t d"],
    mask: Bool[Tensor, "b t"],
    slots: Int[Tensor, "b w"],
    plan: TreePlan,
    weights: LayerWeights,
) -> None:
    """Write the nodes of all levels above leaf `slots`, in place; `climbs` must be True."""
    if backend == "numba":
        from retreever.ops.aggregate.path_numba import climb_numba

        climb_numba(nodes, mask, slots, plan, weights)
    else:
        from retreever.ops.aggregate.path_triton import climb_triton

        climb_triton(nodes, mask, slots, plan, weights)


def renews(
    plan: TreePlan,
    nodes: Float[Tensor, "b t d"],
    pair: tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]],
    rows: tuple[Tensor | None, ...],
    weights: tuple[LayerWeights, ProjectionWeights],
) -> bool:
    """Whether `renew` can run: where the kernels of a way and of keys and values can, and nodes lie densely.

    `rows` are the other tensors of the tree: counts, mask, log counts and counted keys.
    """
    layer, projection = weights
    able = climbs("triton", plan, layer, nodes, 1) and projects(nodes, projection)
    wide = pair[0].shape[2] * pair[0].shape[3] >= NARROWEST_HEAD
    return able and wide and _lie_dense(pair, rows)


def renew(
    nodes: Float[Tensor, "b t d"],
    pair: tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]],
    count: Int[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    logs: tuple[Tensor | None, Tensor | None],
    slots: Int[Tensor, "b 1"],
    real: Bool[Tensor, "b 1"] | None,
    tokens: Float[Tensor, "b 1 d"],
    plan: TreePlan,
    weights: tuple[LayerWeights, ProjectionWeights],
) -> None:
    """Put a token on one leaf of every row and write that leaf and all nodes above it in place; see `renews`.

    Embeddings, counts, masks, keys and values (`pair`), and log counts and counted keys (`logs`) of trees that have
    them, by two launches. Without `real` all tokens are.
    """
    from retreever.ops.aggregate import pairs_triton
    from retreever.ops.aggregate.path_triton import climb_triton
    from retreever.ops.aggregate.project_triton import project_way_triton

    layer, projection = weights
    in_registers = pairs_triton.ENABLED and pairs_triton.fits(plan, layer)
    climb_way = pairs_triton.climb_pairs_triton if in_registers else climb_triton
    climb_way(nodes, mask, slots, plan, layer, count, tokens.contiguous(), real)
    project_way_triton(nodes, pair, count, logs, slots, plan, projection)


def climbs_means(
    backend: Impl,
    pair: tuple[Float[Tensor, "b t h e"], Float[Tensor, "b t h e"]],
    rows: tuple[Tensor | None, ...],
    slots: int,
) -> bool:
    """Whether a backend has a kernel for the means above `slots` leaf slots of every row; `rows` as in `renews`."""
    if slots != 1 or not _infers():
        return False
    return backend == "numba" or (backend == "triton" and _lie_dense(pair, rows))


def climb_means(
    backend: Impl,
    nodes: tuple[Tensor, Tensor],
    count: Int[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    logs: tuple[Tensor | None, Tensor | None],
    slots: Int[Tensor, " b"],
    real: Bool[Tensor, " b"] | None,
    leaves: tuple[Float[Tensor, "b h e"], Float[Tensor, "b h e"]],
    plan: TreePlan,
) -> None:
    """Write keys and values (`nodes`) of one leaf of every row and of all above it, in place, with counts and masks.

    `logs` are log counts and counted keys, of trees that have them. Without `real` all tokens are. `climbs_means` must
    be True.
    """
    if backend == "numba":
        from retreever.ops.aggregate.means_numba import climb_means_numba

        real = torch.ones_like(slots, dtype=torch.bool) if real is None else real
        climb_means_numba(nodes, count, mask, logs, slots, real, leaves, plan)
    else:
        from retreever.ops.aggregate.means_triton import climb_means_triton

        climb_means_triton(nodes, count, mask, logs, slots, real, leaves, plan)


def _lie_dense(pair: tuple[Tensor, Tensor], rows: tuple[Tensor | None, ...]) -> bool:
    """Whether the numbers of a key, and of a value, lie side by side, and `rows` as a whole."""
    width = pair[0].shape[3]
    heads = all(part.stride()[2:] == (width, 1) for part in pair)
    return heads and all(part is None or part.is_contiguous() for part in rows)


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
