"""The operator a user calls: `tree_attention` checks its arguments, picks a backend and returns one fixed structure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_choice, reject
from retreever.checks import check_float, check_mask, check_same, check_tensor
from retreever.errors import BackendError
from retreever.nn.fused_attention import attention
from retreever.ops.reference import full_attention_reference, tree_attention_reference
from retreever.tree.plan import TreePlan

Impl = Literal["auto", "reference", "triton", "numba"]
IMPLS: tuple[Impl, ...] = ("auto", "reference", "triton", "numba")
Backend = Callable[[Tensor, Tensor, Tensor, TreePlan, Tensor | None, Tensor | None], tuple[Tensor, ...]]


class TreeAttention(NamedTuple):
    """What one pass down the tree gives for every query."""

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
    impl: Impl = "auto",
) -> TreeAttention:
    """Walk one path from the root to a leaf block per query and attend to what the path rejects and where it ends.

    At every level the policy over the children is the head mean of their attention weights; the child not taken joins
    the selected set, and so do all leaves of the block the path ends in (paper, Algorithm 1). Policy and cross
    attention use the same scores, so each node is scored once.

    Args:
        q: projected queries.
        keys: projected keys of all nodes, laid out as `plan` says.
        values: projected values of all nodes.
        plan: shape of the tree.
        node_mask: True where a node stands for at least one real token; None means all are real. A masked node has
            probability 0, weight 0 and gradient 0. The first level must have a real node in every row.
        noise: uniforms in [0, 1), one per decision, turned into a choice by inverse CDF over the policy: the same noise
            gives the same path on every backend. 2 + c takes child c, whatever its probability, or the last real one
            where c is padding. None takes the most likely child.
        impl: the backend. "auto" takes triton on CUDA and numba on the CPU where they can run, else plain torch
            ("reference"); a named one that cannot run raises `BackendError`, it never falls back.

    Returns:
        output, path (the leaf block reached), log_prob and entropy of the path (summed over its decisions).
        Gradients flow to q, keys and values through output, log_prob and entropy along the path taken.
    """
    if not _fits(q, keys, values, plan, node_mask, noise):
        _explain(q, keys, values, plan, node_mask, noise)
    # Asking for the device takes four times as long.
    backend = _RESOLVED.get((impl, "cpu" if q.is_cpu else q.device.type, q.dtype)) or _resolve(impl, q)
    return tuple.__new__(TreeAttention, backend(q, keys, values, plan, node_mask, noise))


def full_attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b m h e"]:
    """Attend to all real leaves of the tree instead of searching it (ReTreever-Full, and the L_CA term)."""
    if not _fits(q, keys, values, plan, node_mask, None):
        _explain(q, keys, values, plan, node_mask, None)
    if q.is_cuda and torch.is_grad_enabled():  # trained by fused kernels there
        leaves = slice(plan.leaf_offset, None)
        return attention(q, keys[:, leaves], values[:, leaves], None if node_mask is None else node_mask[:, leaves])
    return full_attention_reference(q, keys, values, plan, node_mask)


def unavailable(impl: Impl, device: str, dtype: torch.dtype) -> str | None:
    """Why the backend `impl` cannot run on tensors of that device and dtype; None when it can."""
    if impl in ("auto", "reference"):
        return None
    try:
        return import_module(f"retreever.ops.{impl}").unavailable(torch.empty(0, dtype=dtype, device=device))
    except ImportError as error:
        return f"{impl} cannot be imported ({error})"


# Backends already found to run, by (impl, device type, dtype): looking one up must cost next to nothing.
_RESOLVED: dict[tuple[str, str, torch.dtype], Backend] = {}


def _resolve(impl: Impl, q: Tensor) -> Backend:
    """The function behind a name, found once per kind of tensors."""
    kind = (impl, q.device.type, q.dtype)
    name = _choose(*kind)
    found: Backend
    if name == "triton":
        from retreever.ops.triton import tree_attention_triton

        found = tree_attention_triton
    elif name == "numba":
        from retreever.ops.numba import tree_attention_numba

        found = tree_attention_numba
    else:
        found = tree_attention_reference
    if not torch.compiler.is_compiling():
        _RESOLVED[kind] = found
    return found


def _choose(impl: Impl, device: str, dtype: torch.dtype) -> Impl:
    """Which backend to use; "auto" takes the fused one of the device where it can run.

    torch.compile runs this while tracing, where a backend can still be imported.
    """
    check_choice("impl", impl, IMPLS)
    reason = unavailable(impl, device, dtype)
    if reason is not None:
        raise BackendError(f"impl='{impl}' cannot run here: {reason}")
    if impl != "auto":
        return impl
    fused: Impl = "triton" if device == "cuda" else "numba"
    return "reference" if unavailable(fused, device, dtype) is not None else fused


# What torch.compiler.assume_constant_result does, without loading the compiler for those who never compile.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fits(
    q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, node_mask: Tensor | None, noise: Tensor | None
) -> bool:
    """All checks at once, as cheap as they can be; what is wrong is found out only when something is."""
    try:
        b, _, h, e = q.shape
        shape, dtype = keys.shape, q.dtype
        return (
            shape == values.shape == (b, plan.nodes, h, e)
            and dtype == keys.dtype == values.dtype
            and dtype.is_floating_point
            and ((q.is_cpu and keys.is_cpu and values.is_cpu) or keys.device == values.device == q.device)
            and (node_mask is None or _mask_fits(node_mask, shape, q.device))
            and (noise is None or _noise_fits(noise, q, plan))
        )
    except (AttributeError, ValueError):  # no tensors, no plan, or other than four axes
        return False


def _mask_fits(node_mask: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    fits = isinstance(node_mask, Tensor) and node_mask.shape == shape[:2]
    return fits and node_mask.dtype == torch.bool and node_mask.device == device


def _noise_fits(noise: Tensor, q: Tensor, plan: TreePlan) -> bool:
    fits = isinstance(noise, Tensor) and noise.shape == (*q.shape[:2], plan.depth) and noise.dtype.is_floating_point
    return fits and noise.device == q.device


def _explain(
    q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, node_mask: Tensor | None, noise: Tensor | None
) -> None:
    """Raise the `InputError` that names what does not fit."""
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
    if noise is not None:
        check_tensor("noise", noise, "b m depth", b=b, m=m, depth=plan.depth)
        check_float("noise", noise)
        check_same("noise", noise, "q", q, dtype=False)
    raise AssertionError("the quick check refused what every single check accepts")
