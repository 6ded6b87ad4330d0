"""Results of the two attention modules, the same in training and in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.ops.frontier.api import Part
from retreever.tree.plan import TreePlan
from retreever.tree.selected import frontier_scored, leaf_nodes, nodes_scored, selected_nodes

Retrieval = Literal["policy", "full"]
RETRIEVALS: tuple[Retrieval, ...] = get_args(Retrieval)


@dataclass(frozen=True)
class KeyValues:
    """A context prepared for `CrossAttention`."""

    keys: Float[Tensor, "b n h e"]
    values: Float[Tensor, "b n h e"]
    mask: Bool[Tensor, "b n"] | None = None

    @property
    def rows(self) -> int:
        """Number of contexts."""
        return self.keys.shape[0]


@dataclass(frozen=True)
class LayerMemory:
    """A context prepared for a stack of attention layers: keys and values for each, the first layer first.

    `parts` is attention of a set of learned tokens to the context, with what is needed to add further points; empty for
    models that cannot.
    """

    layers: tuple[KeyValues, ...]
    parts: tuple[Part, ...] = ()

    @property
    def rows(self) -> int:
        """Number of contexts."""
        return self.layers[0].rows


@dataclass(frozen=True)
class CrossAttentionResult:
    """Output of `CrossAttention`, and how many tokens each query attended to."""

    output: Float[Tensor, "b m d"]
    tokens: int


@dataclass(frozen=True)
class TreeCrossAttentionResult:
    """Output of `TreeCrossAttention` and the search behind it.

    `leaves` is the output read over all leaves with the same weights, None unless requested. `rows` are the nodes read
    under a budget, None for one path. `order` has the caller's number of every token in leaf order, None if that is the
    order given. `beside` is the search of the tree beside, None if there is none: output, log_prob,
    entropy and all counts are of both; path, rows and selected nodes are of one tree each.
    """

    output: Float[Tensor, "b m d"]
    path: Int[Tensor, "b m"]
    log_prob: Float[Tensor, "b m"]
    entropy: Float[Tensor, "b m"]
    plan: TreePlan
    node_mask: Bool[Tensor, "b t"] | None
    retrieval: Retrieval
    leaves: Float[Tensor, "b m d"] | None = None
    rows: Int[Tensor, "b m s"] | None = None
    order: Int[Tensor, "b n"] | None = None
    beside: TreeCrossAttentionResult | None = None

    @property
    def tokens(self) -> int:
        """Nodes attended to per query in a full tree."""
        beside = 0 if self.beside is None else self.beside.tokens
        if self.retrieval == "full":
            return self.plan.n + beside
        return beside + (self.plan.tokens if self.rows is None else min(self.rows.shape[2], self.plan.n))

    @property
    def selected(self) -> Int[Tensor, "b m s"]:
        """Rows of the tree's node tensor attended to, -1 where unused; see `explain` for the tokens they cover."""
        if self.rows is not None:
            return self.rows
        nodes = selected_nodes if self.retrieval == "policy" else leaf_nodes
        return nodes(self.plan, self.path, self.node_mask)

    @property
    def tokens_read(self) -> Int[Tensor, "b m"]:
        """Real nodes attended to, per query: never counts padding."""
        read = (self.selected >= 0).sum(dim=-1)
        return read if self.beside is None else read + self.beside.tokens_read

    @property
    def nodes_scored(self) -> Int[Tensor, "b m"]:
        """Real nodes the policy scored, per query; 0 when all leaves are read."""
        if self.retrieval == "full":
            return torch.zeros_like(self.path)
        if self.rows is not None:
            scored = frontier_scored(self.plan, self.rows)
        else:
            scored = nodes_scored(self.plan, self.path, self.node_mask)
        return scored if self.beside is None else scored + self.beside.nodes_scored
