"""Ways to read a context of n tokens with multi-head attention, all with one interface.

`prepare` is called once per context and may build an index. `read` answers queries with about `budget` vectors each; a
vector is the key and the value of a token, or of a summary of tokens, in one head. Every head chooses for itself,
except in a tree. Contexts are (n, h, e), queries (m, h, e); inside, heads come first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from retreever.ops.search.api import TreeAttention, counted_keys, search
from retreever.ops.search.inputs import SearchInputs
from retreever.tree.means import log_counts, mean_tree
from retreever.tree.order import in_order, leaf_order
from retreever.tree.plan import TreePlan
from retreever.tree.selected import frontier_scored, selected_nodes

Tokens = Float[Tensor, "n h e"]
Queries = Float[Tensor, "m h e"]
ByHead = Float[Tensor, "h _ e"]
Index = Int[Tensor, "h m k"]  # into the tokens of a head, -1 is none
LeafOrder = Literal["given", "kd", "keys"]


class Counts(NamedTuple):
    """Vectors per query and head, on average: those whose values were read, and those whose keys were scored."""

    read: float
    scored: float


class Reading(NamedTuple):
    """What a query got, and a function that counts what it cost, called outside of timing."""

    output: Queries
    counts: Callable[[], Counts]


class Reader(ABC):
    """A way to read a context."""

    least: int = 1  # smallest budget it can keep
    per_budget: bool = False  # whether `prepare` depends on the budget

    @abstractmethod
    def prepare(self, keys: Tokens, values: Tokens, x: Float[Tensor, "n dx"] | None, budget: int) -> None:
        """Prepare a context; `x` are coordinates of its tokens, for those that sort by them."""

    @abstractmethod
    def read(self, q: Queries, budget: int) -> Reading:
        """Attend from all queries."""


class AllTokens(Reader):
    """Attention over all tokens by torch's own kernel, in `dtype` if that is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Lay out keys and values by head."""
        self.keys, self.values = (by_head(part).to(self.dtype or part.dtype)[None] for part in (keys, values))

    def read(self, q: Queries, budget: int) -> Reading:
        """All tokens, whatever the budget."""
        output = F.scaled_dot_product_attention(by_head(q).to(self.keys.dtype)[None], self.keys, self.values)[0]
        n = self.keys.shape[2]
        return Reading(output.transpose(0, 1).to(q.dtype), lambda: Counts(n, n))


class TopK(Reader):
    """The tokens of largest scores, found by scoring all."""

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Lay out keys and values by head."""
        self.keys, self.values = by_head(keys), by_head(values)

    def read(self, q: Queries, budget: int) -> Reading:
        """As many tokens as the budget."""
        n = self.keys.shape[1]
        scores, index = (scaled(q) @ self.keys.mT).topk(min(budget, n), dim=-1)
        return Reading(mix(scores, self.values, index), lambda: Counts(index.shape[2], n))


class RandomTokens(Reader):
    """Tokens drawn at random for every query, the same for all heads."""

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Shuffle once; a query takes neighbours in the shuffled order, from a random place on."""
        self.keys, self.values = by_head(keys), by_head(values)
        generator = torch.Generator(keys.device).manual_seed(0)
        self.shuffled = torch.randperm(len(keys), generator=generator, device=keys.device)

    def read(self, q: Queries, budget: int) -> Reading:
        """As many tokens as the budget."""
        h, n, _ = self.keys.shape
        k = min(budget, n)
        start = self.shuffled[torch.arange(len(q), device=q.device) % n]
        index = self.shuffled[(start[:, None] + torch.arange(k, device=q.device)) % n].expand(h, -1, -1)
        return Reading(mix(score(scaled(q), self.keys, index), self.values, index), lambda: Counts(k, k))


class Blocks(Reader):
    """The blocks of neighbouring tokens whose mean keys score best, as in block-sparse attention."""

    def __init__(self, order: LeafOrder = "given", size: int = 64) -> None:
        self.order: LeafOrder = order
        self.size = self.least = size

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Sort, cut into blocks, average the keys of each."""
        keys, values = sorted_tokens(self.order, keys, values, x)
        self.keys, self.values = by_head(keys), by_head(values)
        cut = torch.split(self.keys, self.size, dim=1)
        self.means = torch.stack([block.mean(dim=1) for block in cut], dim=1)

    def read(self, q: Queries, budget: int) -> Reading:
        """As many whole blocks as fit the budget, one at least."""
        n, blocks = self.keys.shape[1], self.means.shape[1]
        heads = scaled(q)
        best = (heads @ self.means.mT).topk(min(blocks, max(1, budget // self.size)), dim=-1).indices
        index = (best[..., None] * self.size + torch.arange(self.size, device=q.device)).flatten(2)
        index = index.masked_fill(index >= n, -1)
        output = mix(score(heads, self.keys, index), self.values, index)
        return Reading(output, lambda: Counts(read := filled(index), read + blocks))


class TreeOfMeans(Reader):
    """This library: a tree of means with the logarithms of their counts, read along one path or under a budget."""

    def __init__(self, order: LeafOrder) -> None:
        self.order: LeafOrder = order

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Sort the tokens and average upwards, as the `build` of a converted module does."""
        keys, values = sorted_tokens(self.order, keys, values, x)
        plan, keys, values, mask = mean_tree(keys[None], values[None], 2, None)
        counts = log_counts(plan, mask, keys)
        self.tree = SearchInputs(
            keys[:, :0], keys, values, plan, mask, log_count=counts, counted=counted_keys(keys, counts)
        )

    def read(self, q: Queries, budget: int) -> Reading:
        """One path, or what the budget allows beyond it."""
        plan = self.tree.plan
        found = search(self.tree._replace(q=q[None]), "auto", budget if budget > plan.tokens else None)
        return Reading(found.output[0], lambda: count_nodes(found, plan, self.tree.node_mask))


def count_nodes(found: TreeAttention, plan: TreePlan, mask: Tensor | None) -> Counts:
    """Nodes of a tree that a query read, and whose keys it met, on average: leaves are scored when they are read."""
    rows = selected_nodes(plan, found.path, mask) if found.rows is None else found.rows
    read, scored = (rows >= 0).sum(dim=-1), frontier_scored(plan, rows) + (rows >= plan.leaf_offset).sum(dim=-1)
    return Counts(float(read.double().mean()), float(scored.double().mean()))


def sorted_tokens(order: LeafOrder, keys: Tokens, values: Tokens, x: Tensor | None) -> tuple[Tokens, Tokens]:
    """Keys and values in the order given, in k-d order of their coordinates, or with similar keys side by side."""
    if order == "given":
        return keys, values
    if order == "kd":
        assert x is not None
        found = leaf_order("kd", x[None])
    else:
        found = leaf_order("principal", keys.flatten(1)[None])
    return in_order(keys[None], found)[0], in_order(values[None], found)[0]


def by_head(x: Float[Tensor, "n h e"]) -> ByHead:
    """Heads first, contiguous."""
    return x.transpose(0, 1).contiguous()


def scaled(q: Queries) -> ByHead:
    """Queries by head, divided by the root of their width."""
    return by_head(q) * q.shape[-1] ** -0.5


def picked(table: ByHead, index: Index) -> Float[Tensor, "h m k e"]:
    """Rows of every head's table; any row where the index is -1."""
    h, n, e = table.shape
    flat = index.clamp_min(0) + n * torch.arange(h, device=index.device)[:, None, None]
    return table.reshape(h * n, e).index_select(0, flat.flatten()).view(*index.shape, e)


def score(heads: ByHead, keys: ByHead, index: Index) -> Float[Tensor, "h m k"]:
    """Scores of the keys in `index`, -inf where there is none."""
    scores = (picked(keys, index) @ heads[..., None])[..., 0]
    return scores.masked_fill(index < 0, -torch.inf)


def weighted(weights: Float[Tensor, "h m k"], values: ByHead, index: Index) -> ByHead:
    """Sums of the values in `index` by weight."""
    return (weights[:, :, None] @ picked(values, index))[:, :, 0]


def mix(scores: Float[Tensor, "h m k"], values: ByHead, index: Index) -> Queries:
    """Attention to the values in `index`."""
    return weighted(scores.softmax(dim=-1), values, index).transpose(0, 1)


def filled(index: Index) -> float:
    """How many entries of the index a query has, on average."""
    return float((index >= 0).sum(dim=-1).double().mean())
