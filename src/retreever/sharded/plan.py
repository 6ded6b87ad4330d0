"""Which process holds which part of a tree, by arithmetic alone.

The subtrees below level `border` are dealt out in order, so that neighbouring leaves lie on the same process. A row of
`length` tokens takes the leftmost `blocks` leaf blocks, as everywhere (tree/order.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retreever.tree.plan import TreePlan

Numbers = Int[Tensor, "..."]  # shapes that broadcast


@dataclass(frozen=True)
class ShardPlan:
    """A tree cut below level `border` into `branch ** border` subtrees.

    Attributes:
        tree: the whole tree.
        border: lowest level that every process holds; each of its nodes is the root of a subtree.
        holders: processes that hold each subtree.
    """

    tree: TreePlan
    border: int
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, tree: TreePlan, world: int) -> ShardPlan:
        """At least one subtree for each of `world` processes, if the tree has as many leaf blocks."""
        border = 0
        while tree.branch**border < world and border < tree.depth:
            border += 1
        count = tree.branch**border
        return cls(tree, border, tuple((subtree * world // count,) for subtree in range(count)))

    @cached_property
    def subtree(self) -> TreePlan:
        """The shape of every subtree; its root is a node of the border."""
        leaves = self.tree.block * self.tree.branch ** (self.tree.depth - self.border)
        return TreePlan(leaves, self.tree.branch, self.tree.block)

    @property
    def count(self) -> int:
        """Number of subtrees."""
        return len(self.holders)

    @property
    def crown(self) -> int:
        """Rows of the levels that every process holds."""
        return self.tree.offsets[self.border + 1] if self.border else 0

    def held_by(self, rank: int) -> list[int]:
        """Subtrees of a process, ascending."""
        return [subtree for subtree, holders in enumerate(self.holders) if rank in holders]

    def with_copies(self, subtrees: list[int], onto: list[int]) -> ShardPlan:
        """The plan when the processes `onto` hold `subtrees` too."""
        wider = (
            tuple(sorted({*holders, *onto})) if subtree in subtrees else holders
            for subtree, holders in enumerate(self.holders)
        )
        return replace(self, holders=tuple(wider))

    def holder_for(self, rank: int, subtree: Numbers, query: Numbers) -> Numbers:
        """The process that answers each query about a subtree: this one where it can, else its holders in turn."""
        table, sizes = (numbers.to(subtree.device) for numbers in self._table)
        return torch.where((table == rank).any(dim=1)[subtree], rank, table[subtree, query % sizes[subtree]])

    @cached_property
    def _table(self) -> tuple[Int[Tensor, "count most"], Int[Tensor, " count"]]:
        """Holders of every subtree, -1 where there are fewer than of another, and how many each has."""
        rows = [torch.tensor(holders) for holders in self.holders]
        sizes = torch.tensor([len(holders) for holders in self.holders])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1), sizes

    def blocks_of(self, lengths: Numbers) -> Numbers:
        """Leaf blocks taken by rows of these lengths."""
        powers = self.tree.branch ** torch.arange(1, self.tree.depth + 1, device=lengths.device)
        depth = (powers < lengths[..., None]).sum(dim=-1)
        return self.tree.branch**depth

    def slots_of(self, token: Numbers, length: Numbers) -> Numbers:
        """Leaf slot of each token of a row of that length."""
        blocks = self.blocks_of(length)
        block = ((token + 1) * blocks - 1) // length
        return block * self.tree.block + token - block * length // blocks

    def tokens_below(self, level: int, index: Numbers, length: Numbers) -> Numbers:
        """Tokens below the nodes `index` of a level, for rows of that length; 0 at padding."""
        blocks, width = self.blocks_of(length), self.tree.branch ** (self.tree.depth - level)
        start, stop = ((at * width).minimum(blocks) for at in (index, index + 1))
        return stop * length // blocks - start * length // blocks

    def real_rows(self, rows: Numbers, length: Numbers) -> Bool[Tensor, "..."]:
        """Whether rows of the whole tree cover a token of a context of that length."""
        tree = self.tree
        slot = (rows - tree.leaf_offset).clamp_min(0)
        real = slot % tree.block < self.tokens_below(tree.depth, slot // tree.block, length)
        for level in range(tree.depth, 0, -1):
            index = rows - tree.offsets[level]
            below = self.tokens_below(level, index.clamp_min(0), length) > 0
            real = torch.where(rows < tree.offsets[level + 1], below, real)
        return real

    def split_rows(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Subtree, and row inside it, of rows of the whole tree that lie below the border."""
        tree, part = self.tree, self.subtree
        subtree, local = torch.zeros_like(rows), torch.zeros_like(rows)
        for level in range(self.border + 1, tree.depth + 2):
            below = level - self.border
            width = part.leaves if level > tree.depth else tree.branch**below
            index = rows - tree.offsets[level]
            here = index >= 0  # the last level that begins before a row is its own
            subtree = torch.where(here, index // width, subtree)
            local = torch.where(here, part.offsets[below] + index % width, local)
        return subtree, local
