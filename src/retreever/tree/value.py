"""`Tree`: the value that `build` makes and searches read, as a batch, as a pytree and on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from retreever.tree.plan import TreePlan
from retreever.tree.stamp import Stamp


@dataclass(frozen=True, eq=False)
class Tree:
    """The nodes of all levels in one flat tensor, and their keys and values: b trees of one shape, a row each.

    `len` counts the rows, and an index or slice gives trees of some of them. Equality is identity.

    Attributes:
        plan: the shape.
        nodes: embeddings, level after level, the leaves last; None in a tree of means, which has keys and values alone.
        mask: True where a node covers at least one real token; None when every node does.
        keys: projected keys of all nodes.
        values: projected values of all nodes.
        log_count: logarithm of the number of tokens below every node, if it is added to the scores.
        counted: the keys with their log counts, for the search of a path.
        order: the caller's number of every token in leaf order, real ones first; None if they are in the order given.
        count: number of real tokens below every node, in trees that grow; None in others.
        length: in trees that grow, how many tokens were ever appended to a row, those of `build` included.
        beside: a growing tree of tokens appended to a tree that does not grow itself; searches read both.
        longest: at least the largest number in `length`, known without asking the device.
        stamp: the weights that made the tree; None if that is not known.
        mapped: whether the tensors lie in a file that is mapped into memory, and cannot be written to.
    """

    plan: TreePlan
    nodes: Float[Tensor, "b t d"] | None
    mask: Bool[Tensor, "b t"] | None
    keys: Float[Tensor, "b t h e"]
    values: Float[Tensor, "b t h e"]
    log_count: Float[Tensor, "b t"] | None = None
    counted: Float[Tensor, "b t h e1"] | None = None
    order: Int[Tensor, "b n"] | None = None
    count: Int[Tensor, "b t"] | None = None
    length: Int[Tensor, " b"] | None = None
    beside: Tree | None = None
    longest: int = 0
    stamp: Stamp | None = None
    mapped: bool = False

    @property
    def rows(self) -> int:
        """Number of contexts."""
        return self.keys.shape[0]

    @property
    def grows(self) -> bool:
        """Whether tokens can be appended, replaced and evicted in their place: built with a `capacity`."""
        return self.count is not None

    @property
    def tokens(self) -> int:
        """Most tokens of any row; evicted ones count in a tree that grows."""
        own = min(self.longest, self.plan.n) if self.grows else self.plan.n
        return own + (0 if self.beside is None else self.beside.tokens)

    @property
    def beside_share(self) -> float:
        """Tokens beside, as a share of those of the tree itself: when it is large, `fold` the two into one."""
        return 0.0 if self.beside is None else self.beside.tokens / self.plan.n

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: int | slice | Int[Tensor, " r"] | Bool[Tensor, " b"]) -> Tree:
        """Trees of some rows; an int gives a tree of one row. Slices share memory with this tree."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"row: expected {-len(self)} to {len(self) - 1}, got {rows}")
            rows = slice(rows % len(self), rows % len(self) + 1)
        return self.map(lambda tensor: tensor[rows])

    def to(self, target: torch.device | str | torch.dtype) -> Tree:
        """The same tree on another device, or with other floating point numbers."""
        if isinstance(target, torch.dtype):
            return self.map(lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)
        moved = self.map(lambda tensor: tensor.to(target))
        return replace(moved, mapped=self.mapped and moved.keys.is_cpu)

    def detach(self) -> Tree:
        """The same tree without gradients; it shares memory with this one."""
        return self.map(Tensor.detach)

    def clone(self) -> Tree:
        """A copy in memory of its own."""
        return replace(self.map(Tensor.clone), mapped=False)

    def map(self, function: Callable[[Tensor], Tensor]) -> Tree:
        """A tree of function(tensor) for every tensor; each has the rows of the tree as its first axis."""
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        changed: dict[str, Any] = {name: function(value) for name, value in found.items() if isinstance(value, Tensor)}
        if self.beside is not None:
            changed["beside"] = self.beside.map(function)
        return replace(self, **changed)

    def save(self, path: str | Path) -> Path:
        """Write the tree to a safetensors file, atomically, with the fingerprint of the weights that made it."""
        from retreever.tree.keep import save_tree

        return save_tree(self, path)

    @staticmethod
    def load(path: str | Path, *, mmap: bool = False, verify: bool = True) -> Tree:
        """The tree in a file of `save`; a file that is not whole raises `CheckpointError`.

        Args:
            path: the file.
            mmap: map the file instead of reading it: a search reads the pages on its way alone, so the tree may be
                larger than memory. Such a tree cannot be changed in place.
            verify: compare all of the file with its SHA-256, which reads it once, a piece at a time. False checks
                header and size alone.
        """
        from retreever.tree.keep import load_tree

        return load_tree(path, mmap, verify)


def _flatten(tree: Tree) -> tuple[list[Any], tuple[TreePlan, int, bool]]:
    return [getattr(tree, name) for name in _PARTS], (tree.plan, tree.longest, tree.mapped)


def _flatten_with_keys(tree: Tree) -> tuple[list[Any], tuple[TreePlan, int, bool]]:
    parts, context = _flatten(tree)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(_PARTS, parts, strict=True)], context


def _unflatten(parts: Iterable[Any], context: tuple[TreePlan, int, bool]) -> Tree:
    plan, longest, mapped = context
    return Tree(plan, **dict(zip(_PARTS, parts, strict=True)), longest=longest, mapped=mapped)


def _to_json(context: tuple[TreePlan, int, bool]) -> list[int]:
    plan, longest, mapped = context
    return [plan.n, plan.branch, plan.block, longest, int(mapped)]


def _from_json(saved: list[int]) -> tuple[TreePlan, int, bool]:
    return TreePlan(*saved[:3]), saved[3], bool(saved[4])


# A tree is a pytree of its tensors: torch.func, torch.export and data-parallel modules take it. The stamp stays behind.
_PARTS = ("nodes", "mask", "keys", "values", "log_count", "counted", "order", "count", "length", "beside")
pytree.register_pytree_node(
    Tree,
    _flatten,
    _unflatten,
    serialized_type_name="retreever.Tree",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
)
