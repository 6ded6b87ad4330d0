"""`ShardedTree`: a tree over the tokens of several processes, and copies of those of its subtrees that are hot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.ops.search.api import counted_keys
from retreever.sharded.plan import ShardPlan
from retreever.sharded.wire import Wire
from retreever.tree.plan import TreePlan
from retreever.tree.stamp import Stamp
from retreever.tree.value import Tree


@dataclass(frozen=True, eq=False)
class ShardedTree:
    """A tree over several processes, made by `TreeCrossAttention.build_sharded` and searched like any other.

    Attributes:
        shards: which process holds what.
        lengths: tokens of every row, on all processes together.
        crown: nodes, keys and values of levels 1 to the border, on every process.
        part: the subtrees of this process, as rows of one tree: all contexts of its first subtree, then of the next.
        wire: the connection to the other processes, with counts of bytes and messages.
        stamp: the weights that made the tree; None if that is not known.
    """

    shards: ShardPlan
    lengths: Int[Tensor, " b"]
    crown: Tree
    part: Tree
    wire: Wire
    stamp: Stamp | None = None

    @property
    def plan(self) -> TreePlan:
        """The shape of the whole tree."""
        return self.shards.tree

    @property
    def keys(self) -> Float[Tensor, "b t h e"]:
        """Keys of the crown."""
        return self.crown.keys

    @property
    def mask(self) -> None:
        """Which nodes are real follows from the lengths."""

    @property
    def order(self) -> None:
        """Tokens are in the order given."""

    @property
    def beside(self) -> None:
        """No second tree: tokens cannot be appended yet."""

    @property
    def rows(self) -> int:
        """Number of contexts."""
        return len(self.lengths)

    def replicate(self, subtrees: Sequence[int], onto: Sequence[int] | None = None) -> ShardedTree:
        """The same tree where the processes `onto` (None: all) hold copies of `subtrees` that many queries visit.

        A process asks its own copy if it has one, and all holders in turn otherwise. All processes call this with the
        same arguments. `subtree_of` tells which subtree a path ends in.
        """
        onto = range(self.wire.world) if onto is None else onto
        for name, numbers, stop in (("subtrees", subtrees, self.shards.count), ("onto", onto, self.wire.world)):
            for number in numbers:
                check_int(name, number, 0)
                if number >= stop:
                    reject(name, f"numbers from 0 to {stop - 1}", number)
        shards = self.shards.with_copies(list(subtrees), list(onto))
        return replace(self, shards=shards, part=_copied(self, shards))

    def subtree_of(self, path: Int[Tensor, "b m"]) -> Int[Tensor, "b m"]:
        """The subtree in which each path ends."""
        return path // self.plan.branch ** (self.plan.depth - self.shards.border)


def _copied(tree: ShardedTree, shards: ShardPlan) -> Tree:
    """The subtrees that this process holds under `shards`, those it did not have sent by their first holders."""
    wire, before, b = tree.wire, tree.shards, tree.rows
    new = [[s for s in shards.held_by(rank) if rank not in before.holders[s]] for rank in range(wire.world)]
    sends = [[s for s in missing if before.holders[s][0] == wire.rank] for missing in new]
    old = before.held_by(wire.rank)
    position = {subtree: index for index, subtree in enumerate(old)}
    picked = [position[s] for missing in sends for s in missing]
    come = sorted(new[wire.rank], key=lambda s: before.holders[s][0])  # in the order in which it arrives
    order = [[*old, *come].index(subtree) for subtree in shards.held_by(wire.rank)]
    receives = [sum(before.holders[s][0] == rank for s in come) for rank in range(wire.world)]

    def copy(tensor: Tensor) -> Tensor:
        shape = tensor.shape[1:]
        mine = tensor.reshape(len(old), b * shape.numel())
        got = wire.exchange(mine[picked], [len(missing) for missing in sends], receives)
        return torch.cat([mine, got])[order].view(-1, *shape)

    part = tree.part
    keys, values, mask, counts = copy(part.keys), copy(part.values), part.mask, part.log_count
    with torch.no_grad():
        mask = None if mask is None else copy(mask.to(torch.uint8)).bool()
        counts = None if counts is None else copy(counts)
    counted = None if counts is None else counted_keys(keys, counts)
    return Tree(part.plan, None, mask, keys, values, counts, counted)
