"""The operator a user calls: `tree_attention` checks its arguments, picks a backend and returns one fixed structure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.checks import check_choice, check_float, check_mask, check_same, check_tensor, reject
from retreever.ops.reference import full_attention_reference, tree_attention_reference
from retreever.tree.plan import TreePlan

Impl = Literal["auto", "reference"]
IMPLS: tuple[Impl, ...] = ("auto", "reference")


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
            gives the same path on every backend. None takes the most likely child.
        impl: the backend. "auto" chooses; a named one that cannot run raises `BackendError`.

    Returns:
        output, path (the leaf block reached), log_prob and entropy of the path (summed over its decisions).
        Gradients flow to q, keys and values through output, log_prob and entropy along the path taken.
    """
    check_choice("impl", impl, IMPLS)
    _check_operands(q, keys, values, plan, node_mask)
    if noise is not None:
        check_tensor("noise", noise, "b m depth", b=q.shape[0], m=q.shape[1], depth=plan.depth)
        check_float("noise", noise)
        check_same("noise", noise, "q", q, dtype=False)
    return TreeAttention(*tree_attention_reference(q, keys, values, plan, node_mask, noise))


def full_attention(
    q: Float[Tensor, "b m h e"],
    keys: Float[Tensor, "b t h e"],
    values: Float[Tensor, "b t h e"],
    plan: TreePlan,
    node_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b m h e"]:
    """Attend to all real leaves of the tree instead of searching it (ReTreever-Full, and the L_CA term)."""
    _check_operands(q, keys, values, plan, node_mask)
    return full_attention_reference(q, keys, values, plan, node_mask)


def _check_operands(q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, node_mask: Tensor | None) -> None:
    if not isinstance(plan, TreePlan):
        reject("plan", "a TreePlan", type(plan).__name__)
    check_tensor("q", q, "b m h e")
    check_float("q", q)
    b, _, h, e = q.shape
    for name, nodes in (("keys", keys), ("values", values)):
        check_tensor(name, nodes, "b t h e", b=b, t=plan.nodes, h=h, e=e)
        check_same(name, nodes, "q", q)
    if node_mask is not None:
        check_mask("node_mask", node_mask, "b t", b=b, t=plan.nodes)
        check_same("node_mask", node_mask, "q", q, dtype=False)
