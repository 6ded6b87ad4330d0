"""Launch parameters of the Triton kernels: tree shape, tensors with strides, and the tile one program holds."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from torch import Tensor

# Bytes of queries from which a search of a binary tree is limited by memory bandwidth instead of latency.
MANY_BYTES = 1 << 21


class TreeShape(NamedTuple):
    """The sizes of a `TreePlan` that the kernels need."""

    branch: int
    depth: int
    block: int

    @property
    def blocks(self) -> int:
        """Leaf blocks, one at the end of every path."""
        return int(self.branch**self.depth)

    @property
    def leaf_offset(self) -> int:
        """First row of the leaves."""
        return int((self.branch ** (self.depth + 1) - self.branch) // (self.branch - 1))

    @property
    def widest(self) -> int:
        """Most nodes under one parent; without a decision there are only leaves."""
        return max(self.branch, self.block) if self.depth else self.block


class Operands:
    """Tensors with their last axis dense, and their strides in the order the kernels take them."""

    def __init__(self, q: Tensor, keys: Tensor, values: Tensor, node_mask: Tensor | None) -> None:
        self.q, self.keys, self.values = _dense(q), _dense(keys), _dense(values)
        self.mask = None if node_mask is None else _dense(node_mask)
        (qb, qm, qh, _), (kb, kt, kh, _), (vb, vt, vh, _) = self.q.stride(), self.keys.stride(), self.values.stride()
        # The common divisor of the strides is a constant of the kernel: it proves the alignment that wide loads need.
        unit = gcd(16, qb, qm, kb, kt, vb, vt)
        steps = (qb // unit, qm // unit, kb // unit, kt // unit, vb // unit, vt // unit)
        self.strides = (*steps, 0 if self.mask is None else self.mask.stride(0))
        self.unit, self.head_strides = unit, (qh, kh, vh)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, keys, values and mask, in the order of the kernel arguments."""
        return self.q, self.keys, self.values, self.mask


class QueryTile(NamedTuple):
    """Tile of one program of the search or of the gradient of the queries."""

    queries: int
    shape: tuple[int, ...]
    options: dict[str, Any]


class NodeTile(NamedTuple):
    """Tile of one program of the gradient of the nodes: some children, and queries in runs of `length`."""

    children: int
    length: int
    shape: tuple[int, ...]
    options: dict[str, Any]


@lru_cache(maxsize=1024)
def query_tile(queries_bits: int, branch: int, widest: int, h: int, e: int) -> QueryTile:
    """Tile of a search: all children of a node at once if 8192 numbers hold them, else pieces of 4096.

    One warp with 16 numbers per thread is best: reductions stay within it. Several queries share a program only when
    there are enough of them to fill the processors without (16 warps on each of the 132 of an H200).
    """
    row = _power(h) * _power(e)
    children = _power(widest) if _power(widest) * row <= 8192 else max(1, 4096 // row)
    padded = max(children, _power(branch))
    queries = 1
    while queries * children * row <= 128 and (1 << queries_bits >> 1) // (2 * queries) >= 16 * 132 and queries < 16:
        queries *= 2
    return QueryTile(queries, (queries, children, padded, _power(h), _power(e)), _options(queries * children * row))


@lru_cache(maxsize=1024)
def node_tile(widest: int, h: int, e: int) -> NodeTile:
    """Tile of the gradient of the nodes: few children, some queries at a time; as many partial sums as queries."""
    row = _power(h) * _power(e)
    children = min(_power(widest), max(1, 512 // row))
    queries = min(2, max(1, 512 // (children * row)))
    length = max(64, _power(widest))  # so partial sums take no more memory than the queries, level by level
    shape = (queries, children, length, _power(h), _power(e))
    return NodeTile(children, length, shape, _options(queries * children * row))


def _power(size: int) -> int:
    """The smallest power of two >= `size`."""
    return 1 << (size - 1).bit_length()


def _options(numbers: int) -> dict[str, Any]:
    """Launch options of a tile of that many numbers: 16 of them per thread."""
    return {"num_warps": min(8, _power(-(-numbers // 512))), "enable_fp_fusion": True}


def reads_late(q: Tensor, tree: TreeShape, tile: QueryTile) -> bool:
    """Whether to load values after the choice: half the bytes, but two dependent loads per level instead of one.

    It pays once memory bandwidth is the limit, and only for binary trees: of more than two children nearly all are
    rejected, so nearly all values are needed.
    """
    b, m, h, e = q.shape
    _, children, padded, *_ = tile.shape
    binary = tree.branch == 2 and children == padded == 2
    return bool(binary and b * m * h * e * q.element_size() >= MANY_BYTES)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
