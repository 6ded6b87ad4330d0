"""The shape of a tree as integers: where every node lies in the flat node tensor (paper, section 3.1).

Levels are numbered from the root (0). The root is not stored: no query attends to it. Levels 1..depth have branch^l
nodes each and are followed by the leaves, `block` of them under every node of the last level:

    rows:  [ level 1 | level 2 | ... | level depth | leaves ]
    children of node j on level l-1: rows offsets[l] + j*branch ... + branch-1
    leaves under node j of the last level: rows leaf_offset + j*block ... + block-1
"""

from __future__ import annotations

from dataclasses import dataclass, field

from retreever.arguments import check_int, reject


def tree_depth(n: int, branch: int) -> int:
    """Number of decisions: the largest d with branch^d <= n - 1 (0 for n <= branch), in exact integers."""
    depth, power = 0, branch
    while power <= n - 1:
        depth, power = depth + 1, power * branch
    return depth


def packed_plan(n: int, branch: int) -> TreePlan:
    """The plan of a tree that grows: room for the smallest power of `branch` that holds `n` tokens."""
    capacity = branch
    while capacity < n:
        capacity *= branch
    return TreePlan(capacity, branch)


@dataclass(frozen=True)
class TreePlan:
    """Shape of a balanced tree over `n` tokens.

    Args:
        n: number of context tokens, at least 1.
        branch: children per node, at least 2; more than there are tokens are taken for as many.
        block: leaf slots per leaf block (P in the paper's formulas); 0 takes the smallest that fits. Ragged batches
            take `branch`, so that every shorter context has the same tree as alone.

    Attributes:
        depth: decisions on the way down.
        blocks: leaf blocks, branch^depth.
        offsets: first row of every level, 1 to depth, and of the leaves (depth + 1); the root would be row -1.
        leaf_offset: first row of the leaves.
        leaves: leaf slots in all, real or padding.
        full: whether every leaf slot holds a token, so that nothing needs a mask.
        nodes: rows of the flat node tensor (t).
        tokens: nodes attended to per query in a full tree, the rejected siblings of every level and one leaf block.
    """

    n: int
    branch: int = 2
    block: int = 0
    depth: int = field(init=False)
    blocks: int = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    leaf_offset: int = field(init=False)
    leaves: int = field(init=False)
    full: bool = field(init=False)
    nodes: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        check_int("branch", self.branch, 2)
        set_field = object.__setattr__  # the dataclass is frozen; these follow from the arguments
        set_field(self, "branch", min(self.branch, max(self.n, 2)))  # no node has more children than there are tokens
        depth = tree_depth(self.n, self.branch)
        blocks = self.branch**depth
        smallest = -(-self.n // blocks)
        check_int("block", self.block, 0)
        if 0 < self.block < smallest:
            reject("block", f"0 or an int >= {smallest} (n={self.n}, branch={self.branch})", self.block)
        set_field(self, "block", self.block or smallest)
        set_field(self, "depth", depth)
        set_field(self, "blocks", blocks)
        powers = (self.branch**level for level in range(depth + 2))
        set_field(self, "offsets", tuple((power - self.branch) // (self.branch - 1) for power in powers))
        set_field(self, "leaf_offset", self.offsets[-1])
        set_field(self, "leaves", blocks * self.block)
        set_field(self, "full", self.leaves == self.n)
        set_field(self, "nodes", self.leaf_offset + self.leaves)
        set_field(self, "tokens", (self.branch - 1) * depth + self.block)
