"""`tree_attention` and `full_attention`: check their arguments, then run the chosen backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_bool, check_int, reject
from retreever.checks import check_float, check_mask, check_same, check_tensor
from retreever.errors import BackendError
from retreever.ops.attention.api import attention
from retreever.ops.backend import Impl, choose, transformed
from retreever.ops.frontier.api import read_all, read_budget
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import search_reference
from retreever.tree.plan import TreePlan
from retreever.tree.selected import leaf_nodes

_BOOL, _INT64 = torch.bool, torch.int64
Search = Callable[[SearchInputs], tuple[Tensor, Tensor, Tensor, Tensor]]


class TreeAttention(NamedTuple):
    """Result of one pass down the tree, for every query.

    `lse` is the log-sum-exp of the scores read, per head, None unless asked for. `rows` are those of the nodes read
    under a budget, -1 where unused; None for the path alone.
    """

    output: Float[Tensor, "b m h e"]
    path: Int[Tensor, "b m"]
    log_prob: Float[Tensor, "b m"]
    entropy: Float[Tensor, "b m"]
    lse: Float[Tensor, "b m h"] | None = None
    rows: Int[Tensor, "b m s"] | None = None


def tree_attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None = None,
    noise: Float[Tensor, "b m depth"] | None = None,
    choices: Int[Tensor, "b m depth"] | None = None,
    impl: Impl = "auto",
    *,
    budget: int | None = None,
    log_count: Float[Tensor, "b t"] | None = None,
    lse: bool = False,
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
        budget: how many tokens a query may read. It reads at least what one path leaves; a larger budget opens further
            nodes on every level, those that promise most. What is read covers every real token once. None reads the
            path alone; as many as there are tokens, or more, read all leaves.
        log_count: added to the scores of nodes, 0 for leaves: the logarithm of the number of real tokens below a node
            lets a node of means stand for all of them.
        lse: also return the log-sum-exp of the scores read, per head, by which `merge_parts` merges parts of a context.
        impl: the backend. "auto" takes triton on CUDA and numba on the CPU where they can run, else plain torch
            ("reference"); a named one that cannot run raises `BackendError`.

    Returns:
        output, path (the leaf block reached), log_prob and entropy of the path (summed over its decisions), and what a
        budget or `lse` adds. Gradients flow to q, keys and values through output, lse, log_prob and entropy.
    """
    inputs = SearchInputs(q, keys, values, plan, node_mask, noise, choices, log_count)
    if not _fits(inputs):
        _explain(inputs)
    if budget is not None:
        check_int("budget", budget, 1)
    check_bool("lse", lse)
    return search(inputs, impl, budget, lse)


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
    return read_leaves(q, *_without_padding(inputs), plan, node_mask, impl)


def search(inputs: SearchInputs, impl: Impl, budget: int | None = None, lse: bool = False) -> TreeAttention:
    """`tree_attention` without its checks, for callers that have checked."""
    walked = walk(inputs, impl)
    plan = inputs.plan
    if budget is None and not lse and inputs.log_count is None:
        return tuple.__new__(TreeAttention, (*walked, None, None))
    if budget is not None and budget >= plan.n:
        rows = leaf_nodes(plan, walked[1], inputs.node_mask)
        keys, values = _without_padding(inputs)
        if not lse:
            leaves = read_leaves(inputs.q, keys, values, plan, inputs.node_mask, impl)
            return TreeAttention(leaves, *walked[1:], None, rows)
        part = read_all(inputs._replace(keys=keys, values=values))
    else:
        part, rows = read_budget(inputs, walked[1], budget or 1, impl)
    return TreeAttention(part.output, *walked[1:], part.lse if lse else None, None if budget is None else rows)


def walk(inputs: SearchInputs, impl: Impl) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, path, log-probability and entropy of one path; the output is of no use where there are log counts."""
    if inputs.log_count is not None:
        inputs = _with_counts(inputs)
    name = choose("search", impl, inputs.q)
    if name != "reference" and transformed():
        if impl != "auto":
            raise BackendError(f"impl='{impl}' cannot run under torch.func transforms; impl='reference' can")
        name = "reference"
    backend = _BACKENDS.get(name) or _load(name)
    return backend(inputs)


def _without_padding(inputs: SearchInputs) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros at padding, which may hold NaN: 0 * NaN is NaN."""
    if inputs.node_mask is None:
        return inputs.keys, inputs.values
    padding = ~inputs.node_mask[..., None, None]
    return inputs.keys.masked_fill(padding, 0), inputs.values.masked_fill(padding, 0)


def counted_keys(keys: Float[Tensor, "b t h e"], log_count: Float[Tensor, "b t"]) -> Float[Tensor, "b t h e1"]:
    """The keys with the log counts as one more number."""
    extra = log_count.to(keys.dtype)[:, :, None, None].expand(*keys.shape[:3], 1)
    return torch.cat([keys, extra], dim=-1)


def _with_counts(inputs: SearchInputs) -> SearchInputs:
    """A search for the same path: the query multiplies the log counts by a constant. It reads no values."""
    assert inputs.log_count is not None
    width = inputs.q.shape[-1]
    q = F.pad(inputs.q * ((width + 1) / width) ** 0.5, (0, 1), value=(width + 1) ** 0.5)
    keys = counted_keys(inputs.keys, inputs.log_count) if inputs.counted is None else inputs.counted
    return inputs._replace(q=q, keys=keys, values=keys, log_count=None, counted=None)


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
    q, keys, values, plan, node_mask, noise, choices, log_count, _ = inputs
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
            and (log_count is None or (_matches(log_count, shape[:2], q) and log_count.dtype.is_floating_point))
        )
    except (AttributeError, ValueError):  # not tensors, not a plan, or not four axes
        return False


def _matches(tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == shape and tensor.device == q.device


def _explain(inputs: SearchInputs) -> None:
    """Raise the `InputError` that names the argument that does not fit."""
    q, keys, values, plan, node_mask, noise, choices = inputs[:7]
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
    if inputs.log_count is not None:
        check_tensor("log_count", inputs.log_count, "b t", b=b, t=plan.nodes)
        check_float("log_count", inputs.log_count)
        check_same("log_count", inputs.log_count, "q", q, dtype=False)
    raise AssertionError("_fits refused arguments that every check of _explain accepts")
