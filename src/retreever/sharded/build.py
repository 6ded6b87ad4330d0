"""Build a tree over the tokens of several processes: where its leaves are, with the levels above on all of them.

The tree is that of all tokens, in the order of the processes, whoever brought how many: tokens move to the process that
holds their leaf, subtrees are built there, and their roots are sent to all, which build the crown above them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.ops.backend import Impl
from retreever.ops.search.api import counted_keys
from retreever.sharded.plan import ShardPlan
from retreever.sharded.tree import ShardedTree
from retreever.sharded.wire import Route, Wire
from retreever.tree.build import nodes_over, plan_for, summarise
from retreever.tree.means import log_counts
from retreever.tree.value import Tree

Heads = Float[Tensor, "b t h e"]
Project = Callable[[Tensor], tuple[Tensor, Tensor]]  # nodes (b, t, d) to keys and values (b, t, h, e)


class Builder(Protocol):
    """What a tree is built with: a `TreeCrossAttention`."""

    aggregator: nn.Module | None
    branch: int
    detach: bool
    log_count: bool
    impl: Impl

    @property
    def order(self) -> str:
        """How tokens are laid on leaves."""


def build_for(module: Builder, context: Tensor, mask: Tensor | None, wire: Wire, project: Project) -> ShardedTree:
    """The tree of a module over the tokens of all processes; padding holds finite numbers."""
    if module.order != "given":
        reject("order", "'given' for a tree over several processes", repr(module.order))
    if module.aggregator is not None:
        return build_sharded(context, mask, wire, module, module.aggregator, project)
    tokens, split = counted_tokens(*project(context))
    return build_sharded(tokens, mask, wire, module, CountedMean(), split)


class CountedMean(nn.Module):
    """The mean of all tokens below a node: the last number of every child says how many it stands for."""

    def forward(
        self, children: Float[Tensor, "g k d"], mask: Bool[Tensor, "g k"] | None = None
    ) -> Float[Tensor, "g d"]:
        counts = children[..., -1:]
        total = counts.sum(dim=1)
        mean = (children[..., :-1] * counts).sum(dim=1) / total.clamp_min(1)
        return torch.cat([mean, total], dim=-1)


def counted_tokens(keys: Heads, values: Heads) -> tuple[Float[Tensor, "b n d"], Project]:
    """Keys and values as tokens for `CountedMean`, and the projection that gives them back."""
    h, e, dtype = *keys.shape[2:], keys.dtype
    both = torch.cat([keys.flatten(2), values.flatten(2)], dim=2).to(torch.promote_types(dtype, torch.float32))

    def split(nodes: Float[Tensor, "b t d"]) -> tuple[Heads, Heads]:
        keys, values = nodes[..., :-1].to(dtype).view(*nodes.shape[:2], 2, h, e).unbind(dim=2)
        return keys, values

    return torch.cat([both, torch.ones_like(both[..., :1])], dim=2), split


def build_sharded(
    tokens: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b n"] | None,
    wire: Wire,
    module: Builder,
    aggregator: nn.Module,
    project: Project,
) -> ShardedTree:
    """The tree over the tokens of all processes, those of process 0 first, its nodes made by `aggregator`."""
    shares, ragged = _shares(tokens, mask, wire)
    lengths = shares.sum(dim=0)
    if not bool((lengths > 0).all()):
        reject("context", "at least one token in every row, on any process", f"lengths {lengths.tolist()}")
    shards = ShardPlan.over(plan_for(int(lengths.max()), module.branch, ragged), wire.world)
    leaves, real = _settle(tokens, mask, shares, shards, wire)
    whole = shards.tree.full and not ragged
    detach = module.detach and module.aggregator is not None
    nodes, node_mask = nodes_over(leaves, None if whole else real, shards.subtree, aggregator, detach, module.impl)
    above = _crown(nodes, node_mask, shards, wire, tokens.shape[0], lengths, aggregator, detach, whole)
    if node_mask is not None:  # rows that end before a subtree are never searched there: let nothing become NaN
        node_mask = node_mask | ~node_mask.any(dim=1, keepdim=True)
    crown = Tree(shards.tree, *above, *project(above[0]))
    part = Tree(shards.subtree, nodes, node_mask, *project(nodes))
    if module.log_count:
        counts = log_counts(shards.subtree, node_mask, part.keys)
        part = replace(part, log_count=counts, counted=counted_keys(part.keys, counts))
        crown = replace(crown, log_count=_tokens(shards, lengths).clamp_min(1).to(counts.dtype).log())
    return ShardedTree(shards, lengths, crown, part, wire)


def _shares(tokens: Tensor, mask: Tensor | None, wire: Wire) -> tuple[Int[Tensor, "world b"], bool]:
    """Tokens of every row on every process, and whether any process has a mask."""
    b, n, d = tokens.shape
    facts = wire.everyone(torch.tensor([b, d, int(mask is not None)]))
    if not bool((facts[:, :2] == facts[0, :2]).all()):
        reject("context", "as many rows, and the same width, on every process", facts[:, :2].tolist())
    own = torch.full((b,), n, device=tokens.device) if mask is None else mask.sum(dim=1)
    return wire.everyone(own), bool(facts[:, 2].any())


def _settle(
    tokens: Tensor, mask: Tensor | None, shares: Tensor, shards: ShardPlan, wire: Wire
) -> tuple[Float[Tensor, "r leaves d"], Bool[Tensor, "r leaves"]]:
    """Tokens on the leaves of this process's subtrees, and which leaves have one."""
    b, n, d = tokens.shape
    part = shards.subtree
    real = torch.ones(b, n, dtype=torch.bool, device=tokens.device) if mask is None else mask
    row, _ = real.nonzero(as_tuple=True)
    number = (shares[: wire.rank].sum(dim=0)[:, None] + real.cumsum(dim=1) - 1)[real]
    slot = shards.slots_of(number, shares.sum(dim=0)[row])
    subtree = slot // part.leaves
    to = shards.holder_for(wire.rank, subtree, number)
    first = torch.tensor([min(shards.held_by(rank), default=0) for rank in range(wire.world)], device=to.device)
    target = ((subtree - first[to]) * b + row) * part.leaves + slot % part.leaves
    route = Route(wire, to)
    come, where = route.send(tokens[real]), route.send(target)
    rows = len(shards.held_by(wire.rank)) * b
    leaves = come.new_zeros(rows * part.leaves, d).index_copy(0, where, come)
    filled = torch.zeros(rows * part.leaves, dtype=torch.bool, device=come.device)
    filled[where] = True
    return leaves.view(rows, part.leaves, d), filled.view(rows, part.leaves)


def _crown(
    nodes: Tensor,
    node_mask: Tensor | None,
    shards: ShardPlan,
    wire: Wire,
    b: int,
    lengths: Tensor,
    aggregator: nn.Module,
    detach: bool,
    whole: bool,
) -> tuple[Float[Tensor, "b t d"], Bool[Tensor, "b t"] | None]:
    """Nodes of levels 1 to the border, and their mask: from the roots of all subtrees, the same on every process."""
    if not shards.border:
        return nodes.new_zeros(b, 0, nodes.shape[2]), None
    part = shards.subtree
    top = part.branch if part.depth else part.block  # children of a subtree's root
    below = None if node_mask is None else node_mask[:, :top]
    roots = summarise(nodes[:, :top], below, 1, aggregator, detach)[:, 0]
    sizes = [len(shards.held_by(rank)) * b for rank in range(wire.world)]
    gathered = wire.exchange(roots.repeat(wire.world, 1), [len(roots)] * wire.world, sizes)
    levels = [gathered.view(shards.count, b, -1).transpose(0, 1)]
    real = None if whole else _tokens(shards, lengths) > 0
    masks = [None] * shards.border if real is None else _by_level(shards, real)
    for level in range(shards.border, 1, -1):
        parents = shards.tree.branch ** (level - 1)
        levels.append(summarise(levels[-1], masks[level - 1], parents, aggregator, detach))
    return torch.cat(levels[::-1], dim=1), real


def _tokens(shards: ShardPlan, lengths: Tensor) -> Int[Tensor, "b t"]:
    """Tokens below every node of the crown."""
    counts = []
    for level in range(1, shards.border + 1):
        index = torch.arange(shards.tree.branch**level, device=lengths.device)
        counts.append(shards.tokens_below(level, index, lengths[:, None]))
    return torch.cat(counts, dim=1) if counts else lengths.new_zeros(len(lengths), 0)


def _by_level(shards: ShardPlan, real: Bool[Tensor, "b t"]) -> list[Tensor]:
    """The mask of every level of the crown."""
    return list(torch.split(real, [shards.tree.branch**level for level in range(1, shards.border + 1)], dim=1))
