"""`tree_attention` and `full_attention`: check their arguments, then run the chosen backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import reject
from retreever.checks import check_float, check_mask, check_same, check_tensor
from retreever.ops.attention.api import attention
from retreever.ops.backend import Impl, choose
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import search_reference
from retreever.tree.plan import TreePlan

_BOOL, _INT64 = torch.bool, torch.int64
Search = Callable[[SearchInputs], tuple[Tensor, Tensor, Tensor, Tensor]]


class TreeAttention(NamedTuple):
    """Result of one pass down the tree, for every query."""

    output: Float[Tensor, "b m h e"]
    path: Int[Tensor, "b m"]
    log_prob: Float[Tensor, "b m"]
    entropy: Float[Tensor, "b m"]


def tree_attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None = None,
    noise: Float[Tensor, "b m depth"] | None = None,
    choices: Int[Tensor, "b m depth"] | None = None,
    impl: Impl = "auto",
) -> TreeAttention:
    """Walk one path from the root to a leaf block per query; attend to the rejected siblings and to that leaf block.

    At every level the policy over the children is the head mean of their attention weights; the child not taken joins
    the selected set, and so do all leaves of the block the path ends in (paper, Algorithm 1). Policy and cross
    attention use the same scores, so each node is scored once.

    Args:
        q: projected queries.
        keys: projected keys of all nodes, laid out as `plan` says.
        values: projected values of all nodes.
        plan: shape of the tree.
        node_mask: True where a node covers at least one real token; None means all are real. A masked node has
            probability 0, weight 0 and gradient 0, whatever it holds. The first level must have a real node in every
            row.
        noise: uniforms in [0, 1), one per decision, turned into a choice by inverse CDF over the policy: the same noise
            gives the same path on every backend. None takes the most likely child.
        choices: the child to take at each decision, whatever its probability; -1, and children that are padding, leave
            the decision to the policy.
        impl: the backend. "auto" takes triton on CUDA and numba on the CPU where they can run, else plain torch
            ("reference"); a named one that cannot run raises `BackendError`.

    Returns:
        output, path (the leaf block reached), log_prob and entropy of the path (summed over its decisions).
        Gradients flow to q, keys and values through output, log_prob and entropy along the path taken.
    """
    inputs = SearchInputs(q, keys, values, plan, node_mask, noise, choices)
    if not _fits(inputs):
        _explain(inputs)
    return search(inputs, impl)


def full_attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "b m h e"]:
    """Attend to all real leaves of the tree instead of searching it (ReTreever-Full, and the L_CA term)."""
    inputs = SearchInputs(q, keys, values, plan, node_mask)
    if not _fits(inputs):
        _explain(inputs)
    if node_mask is not None:  # padding may hold NaN, and 0 * NaN is NaN
        keys, values = (nodes.masked_fill(~node_mask[..., None, None], 0) for nodes in (keys, values))
    return read_leaves(q, keys, values, plan, node_mask, impl)


def search(inputs: SearchInputs, impl: Impl) -> TreeAttention:
    """`tree_attention` without its checks, for callers that have checked."""
    name = choose("search", impl, inputs.q)
    backend = _BACKENDS.get(name) or _load(name)
    return tuple.__new__(TreeAttention, backend(inputs))


def read_leaves(
    q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, node_mask: Tensor | None, impl: Impl
) -> Float[Tensor, "b m h e"]:
    """`full_attention` without its checks, for callers that have checked."""
    leaves = slice(plan.leaf_offset, None)
    mask = None if node_mask is None else node_mask[:, leaves]
    return attention(q, keys[:, leaves], values[:, leaves], mask, impl=impl)


_BACKENDS: dict[Impl, Search] = {"reference": search_reference}


def _load(name: Impl) -> Search:
    """Import the kernels of a backend; called when it is first used."""
    if name == "triton":
        from retreever.ops.search.launch_triton import search_triton

        _BACKENDS[name] = search_triton
    else:
        from retreever.ops.search.launch_numba import search_numba

        _BACKENDS[name] = search_numba
    return _BACKENDS[name]


def _fits(inputs: SearchInputs) -> bool:
    """Whether all arguments fit together, checked quickly; `_explain` finds the reason when they do not."""
    q, keys, values, plan, node_mask, noise, choices = inputs
    try:
        b, m, h, e = q.shape
        shape, dtype = keys.shape, q.dtype
        decisions = (b, m, plan.depth)
        return (
            shape == values.shape == (b, plan.nodes, h, e)
            and dtype == keys.dtype == values.dtype
            and dtype.is_floating_point
            and ((q.is_cpu and keys.is_cpu and values.is_cpu) or keys.device == values.device == q.device)
            and (node_mask is None or (_matches(node_mask, shape[:2], q) and node_mask.dtype is _BOOL))
            and (noise is None or (_matches(noise, decisions, q) and noise.dtype.is_floating_point))
            and (choices is None or (_matches(choices, decisions, q) and choices.dtype is _INT64))
        )
    except (AttributeError, ValueError):  # not tensors, not a plan, or not four axes
        return False


def _matches(tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == shape and tensor.device == q.device


def _explain(inputs: SearchInputs) -> None:
    """Raise the `InputError` that names the argument that does not fit."""
    q, keys, values, plan, node_mask, noise, choices = inputs
    if not isinstance(plan, TreePlan):
        reject("plan", "a TreePlan", type(plan).__name__)
    check_tensor("q", q, "b m h e")
    check_float("q", q)
    b, m, h, e = q.shape
    for name, nodes in (("keys", keys), ("values", values)):
        check_tensor(name, nodes, "b t h e", b=b, t=plan.nodes, h=h, e=e)
        check_same(name, nodes, "q", q)
    if node_mask is not None:
        check_mask("node_mask", node_mask, "b t", b=b, t=plan.nodes)
        check_same("node_mask", node_mask, "q", q, dtype=False)
    for name, decisions in (("noise", noise), ("choices", choices)):
        if decisions is not None:
            check_tensor(name, decisions, "b m depth", b=b, m=m, depth=plan.depth)
            check_same(name, decisions, "q", q, dtype=False)
    if noise is not None:
        check_float("noise", noise)
    if choices is not None and choices.dtype != _INT64:
        reject("choices", "dtype torch.int64", choices.dtype)
    raise AssertionError("_fits refused arguments that every check of _explain accepts")
