"""Queries that visit subtrees on other processes: how they get there, stand in rows there, and are merged again."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from retreever.ops.frontier.api import Part, merge_parts
from retreever.ops.search.inputs import SearchInputs
from retreever.sharded.tree import ShardedTree
from retreever.sharded.wire import Route
from retreever.tree.value import Tree

Visitors = Shaped[Tensor, "v *c"]


class Visit:
    """Pairs of a query, numbered through all contexts of this process, and a subtree that it visits.

    Attributes:
        route: from the queries of this process to the subtrees, and back.
        to: the process that every pair goes to.
        rows: row of `tree.part` that each query visits that came here.
        places: place of the node `row` of the subtree among all nodes of `tree.part`, for those queries.
    """

    def __init__(
        self,
        tree: ShardedTree,
        query: Int[Tensor, " n"],
        subtree: Int[Tensor, " n"],
        m: int,
        row: Int[Tensor, " n"] | None = None,
    ) -> None:
        rank, device = tree.wire.rank, query.device
        self.query = query
        self.to = tree.shards.holder_for(rank, subtree, query)
        self.route = Route(tree.wire, self.to)
        numbers = [query // max(1, m), subtree, *([] if row is None else [row])]
        context, subtree, *first = self.route.send(torch.stack(numbers, dim=1)).unbind(dim=1)
        held = torch.tensor(tree.shards.held_by(rank), dtype=torch.int64, device=device)
        self.rows = torch.searchsorted(held, subtree.contiguous()) * tree.rows + context
        self.places = self.rows * tree.part.plan.nodes + (first[0] if first else 0)

    def send(self, values: Shaped[Tensor, "b m *c"]) -> Visitors:
        """What belongs to the query of each pair, to where it visits."""
        return self.route.send(values.flatten(0, 1)[self.query])

    def merged(self, found: Part, above: Part | None, b: int, m: int) -> Part:
        """Parts (1, v, ...) read by visitors, back at their queries and merged with the part of the crown.

        Pairs are in the order of their queries.
        """
        h, e = found.output.shape[2:]
        both = torch.cat([found.output[0].flatten(1).to(found.lse.dtype), found.lse[0]], dim=1)
        output, lse = torch.split(self.route.back(both), [h * e, h], dim=1)
        counts = torch.bincount(self.query, minlength=b * m)
        place = torch.arange(len(self.query), device=lse.device) - (counts.cumsum(0) - counts)[self.query]
        width = max(1, int(counts.max()) if len(counts) else 0)
        at = self.query * width + place
        outputs = output.new_zeros(b * m * width, h * e).index_copy(0, at, output).view(b, m, width, h, e)
        every = lse.new_full((b * m * width, h), -torch.inf).index_copy(0, at, lse).view(b, m, width, h)
        parts = [Part(outputs[:, :, index], every[:, :, index]) for index in range(width)]
        return merge_parts(parts if above is None else [above, *parts])


class Packing:
    """Visitors in a rectangle: a row for every row of the tree, as wide as the one with most; zeros fill up."""

    def __init__(self, rows: Int[Tensor, " v"], count: int) -> None:
        counts = torch.bincount(rows, minlength=count)
        self.shape = count, max(1, int(counts.max()))
        order = rows.argsort(stable=True)
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
        self.at = torch.empty_like(rows).index_copy(0, order, rows[order] * self.shape[1] + place)

    def pack(self, visitors: Visitors) -> Shaped[Tensor, "r m *c"]:
        """The rectangle of what belongs to visitors."""
        filled = visitors.new_zeros(self.shape[0] * self.shape[1], *visitors.shape[1:])
        return filled.index_copy(0, self.at, visitors).view(*self.shape, *visitors.shape[1:])

    def unpack(self, rectangle: Shaped[Tensor, "r m *c"]) -> Visitors:
        """What belongs to visitors, from the rectangle."""
        return rectangle.flatten(0, 1)[self.at]


def flat_inputs(part: Tree, q: Float[Tensor, "v h e"]) -> SearchInputs:
    """The rows of all trees of `part` as one row, for visitors of any of them."""
    h, e = part.keys.shape[2:]
    keys, values = part.keys.reshape(1, -1, h, e), part.values.reshape(1, -1, h, e)
    mask = None if part.mask is None else part.mask.reshape(1, -1)
    counts = None if part.log_count is None else part.log_count.reshape(1, -1)
    return SearchInputs(q[None], keys, values, part.plan, mask, log_count=counts)


def nothing(part: Tree, visitors: Visitors, width: int) -> Float[Tensor, "0 width"]:
    """The answer of a process that holds no subtree, connected to the same tensors as all others' for gradients."""
    return visitors.new_zeros(0, width) + 0 * (visitors.sum() + part.keys.sum() + part.values.sum())
