"""Attention to the nodes that a reading budget leaves: one path and, level by level, what promises most beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import reject
from retreever.ops.backend import Impl, choose, transformed
from retreever.ops.frontier.reference import frontier_reference
from retreever.ops.gradients import needs_gradient
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import pick_rows, score_rows
from retreever.tree.budget import Spread, slots, spread
from retreever.tree.plan import TreePlan

Expand = Callable[[SearchInputs, Tensor, int, Spread], tuple[Tensor, Tensor, Tensor]]


class Part(NamedTuple):
    """Attention to a part of the tokens: merged with other parts by its log-sum-exp, it is attention to all of them."""

    output: Float[Tensor, "b m h e"]
    lse: Float[Tensor, "b m h"]


def read_budget(
    inputs: SearchInputs, path: Int[Tensor, "b m"], budget: int, impl: Impl
) -> tuple[Part, Int[Tensor, "b m s"]]:
    """Attention to the nodes that `budget` leaves, and their rows, -1 where there are fewer."""
    name = choose("frontier", impl, inputs.q)
    plan, wanted = inputs.plan, needs_gradient(*inputs[:3])
    plain = inputs
    if wanted:
        plain = inputs._replace(q=inputs.q.detach(), keys=inputs.keys.detach(), values=inputs.values.detach())
    if name == "reference" or transformed():
        rows = frontier_reference(plain, path, budget, spread(plan, budget, inputs.node_mask))
        return read_rows(inputs, rows), rows
    if torch.compiler.is_compiling():
        tensors = (*plain[:3], plain.node_mask, plain.log_count, path)
        sizes = (plan.n, plan.branch, plan.block, budget, slots(plan, budget))
        output, lse, rows = _run_op(*tensors, *sizes, name)
    else:
        output, lse, rows = _expand(plain, path, budget, name)
    return read_rows(inputs, rows) if wanted else Part(output, lse), rows


def _expand(inputs: SearchInputs, path: Tensor, budget: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp per head and rows of the nodes read, by the kernels of a backend, without gradients."""
    open_ = spread(inputs.plan, budget, inputs.node_mask)
    expand = _load(backend, inputs, open_)
    if expand is not None:
        return expand(inputs, path, budget, open_)
    rows = frontier_reference(inputs, path, budget, open_)
    return *read_rows(inputs, rows), rows


def _run(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    log_count: Tensor | None,
    path: Tensor,
    n: int,
    branch: int,
    block: int,
    budget: int,
    width: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_expand` with the arguments of a custom op; `width` of the rows is for the fake, where sizes may be symbols."""
    inputs = SearchInputs(q, keys, values, TreePlan(n, branch, block), node_mask, log_count=log_count)
    return _expand(inputs, path, budget, backend)


_run_op = torch.library.custom_op("retreever::read_budget", _run, mutates_args=())


@_run_op.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, m, h, _ = q.shape
    path, width = rest[4], rest[9]
    lse = q.new_empty(b, m, h, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse, path.new_empty(b, m, width)


def read_rows(inputs: SearchInputs, rows: Int[Tensor, "b m s"]) -> Part:
    """Attention to the nodes in `rows` (-1 is no node), in plain torch, with gradients."""
    q = inputs.q.to(torch.promote_types(inputs.q.dtype, torch.float32))
    real, node = rows >= 0, rows.clamp_min(0)
    scores = score_rows(q, inputs.keys, inputs.node_mask, node, inputs.log_count)
    scores = scores.masked_fill(~real[..., None], -torch.inf)
    picked = pick_rows(inputs.values, node, inputs.node_mask).masked_fill(~real[..., None, None], 0)
    output = (scores.softmax(dim=2)[..., None] * picked).sum(dim=2)
    return Part(output.to(inputs.q.dtype), scores.logsumexp(dim=2))


def read_all(inputs: SearchInputs) -> Part:
    """Attention to all leaves with its log-sum-exp, in plain torch; padding holds finite numbers."""
    leaves = slice(inputs.plan.leaf_offset, None)
    mask = None if inputs.node_mask is None else inputs.node_mask[:, leaves]
    return attend_part(inputs.q, inputs.keys[:, leaves], inputs.values[:, leaves], mask)


def attend_part(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b n h e"],
    values: Float[Tensor, "b n h e"],
    mask: Bool[Tensor, "b n"] | None = None,
) -> Part:
    """Attention to all real tokens with its log-sum-exp, in plain torch; padding holds finite numbers."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bmhe,bnhe->bmhn", q.to(dtype), keys.to(dtype)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    output = torch.einsum("bmhn,bnhe->bmhe", scores.softmax(dim=-1), values.to(dtype))
    return Part(output.to(q.dtype), scores.logsumexp(dim=-1))


def merge_parts(parts: list[Part]) -> Part:
    """Attention to the union of disjoint parts, exactly: each weighs exp(lse - largest lse)."""
    if not parts:
        reject("parts", "at least one", "none")
    lse = torch.stack([part.lse for part in parts])
    output = (lse.softmax(dim=0)[..., None] * torch.stack([part.output for part in parts])).sum(dim=0)
    return Part(output.to(parts[0].output.dtype), lse.logsumexp(dim=0))


def _load(name: str, inputs: SearchInputs, open_: Spread) -> Expand | None:
    """The kernels of a backend; None where it has none for these inputs."""
    if name == "triton":
        from retreever.ops.frontier.launch_triton import expand_triton, fits_triton

        return expand_triton if fits_triton(inputs, open_) else None
    if name == "numba":
        from retreever.ops.frontier.launch_numba import expand_numba

        return expand_numba
    return None
