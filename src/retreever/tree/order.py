"""Which token lies on which leaf: orders that put similar tokens side by side, and the even split over leaf blocks.

Orders are those of the paper's section 3.1 and appendix "tree design". Every order takes coordinates x (b, n, dx) and
an optional mask (b, n) and returns a permutation (b, n) with the real tokens first. An order is computed once per
context and never touches the embeddings. All work is batched: the only Python loop is over the levels of the tree.

A context of n real tokens spreads evenly over its leaf blocks: block j of B holds tokens floor(j*n/B) up to
floor((j+1)*n/B), so sizes differ by at most one, on every level of the tree (this is what median splits give).
In a ragged batch the tree is as deep as the longest context needs. A shorter context takes the leftmost subtree of
exactly the depth it would have alone; the nodes above have a single real child, so no decision is made there and the
result is that of the context alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_choice, check_int, reject
from retreever.batch import without_padding
from retreever.checks import check_finite, check_mask, check_same, check_tensor
from retreever.tree.plan import TreePlan, tree_depth

Order = Literal["given", "axis", "kd", "kd-widest", "ball", "principal", "random", "projection"]
ORDERS: tuple[Order, ...] = ("given", "axis", "kd", "kd-widest", "ball", "principal", "random", "projection")
POWER_ITERATIONS = 4
Coordinates = Float[Tensor, "b n dx"]
Permutation = Int[Tensor, "b n"]
# Given (x in current order, segment id of each token, level), the value each segment is sorted by.
SplitKey = Callable[[Tensor, Tensor, int], Tensor]


def leaf_order(
    order: Order,
    x: Coordinates,
    mask: Bool[Tensor, "b n"] | None = None,
    *,
    branch: int = 2,
    axis: int = 0,
    seed: int = 0,
) -> Permutation:
    """The permutation that puts tokens at coordinates `x` into leaf order.

    Args:
        order: "given" keeps the order (sequences, time series); "axis" sorts by one coordinate; "kd" splits at the
            median of the axes in turn, "kd-widest" of the widest axis; "ball" splits along the farthest pair, as ball
            trees do; "principal" along the direction in which tokens vary most, for many coordinates; "random";
            "projection" sorts by x @ w with w drawn once from `seed` (ReTreever-KD-RP).
        x: coordinates of the tokens.
        mask: True where a token is real; others go last.
        branch: children per node of the tree ("kd" and "ball" split into as many parts).
        axis: the coordinate of "axis".
        seed: of "random" and "projection".
    """
    check_choice("order", order, ORDERS)
    check_tensor("x", x, "b n dx")
    check_int("branch", branch, 2)
    if x.dtype == torch.bool:
        reject("x", "numbers", x.dtype)
    if x.shape[2] == 0:
        reject("x", "at least one coordinate", tuple(x.shape))
    if mask is not None:
        check_mask("mask", mask, "b n", b=x.shape[0], n=x.shape[1])
        check_same("mask", mask, "x", x, dtype=False)
        x = without_padding(x, mask)
    if not x.is_cuda and x.dtype.is_floating_point:  # reading values on CUDA would make every call wait for the device
        check_finite("x", x)
    return permutation_of(order, x, mask, branch, axis, seed)


def permutation_of(
    order: Order, x: Coordinates, mask: Bool[Tensor, "b n"] | None, branch: int, axis: int, seed: int
) -> Permutation:
    """`leaf_order` without its checks, for callers that have checked; padding holds finite numbers."""
    if order == "given":
        return _masked_last(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]), mask)
    if order in ("axis", "random", "projection"):
        return _masked_last(_flat_value(order, x, axis, seed).argsort(dim=1, stable=True), mask)
    if x.shape[2] == 1:  # on a line, every k-d or ball tree is one sort
        return _masked_last(x[..., 0].argsort(dim=1, stable=True), mask)
    keys: dict[str, SplitKey] = {
        "kd": _cycling_axis,
        "kd-widest": _widest_axis,
        "ball": _farthest_pair,
        "principal": _principal_direction,
    }
    return _recursive_order(x, mask, branch, keys[order])


def in_order(values: Tensor, permutation: Permutation) -> Tensor:
    """values (b, n, ...) with the tokens of every row in the order of `permutation`."""
    index = permutation.reshape(permutation.shape + (1,) * (values.dim() - 2))
    return values.gather(1, index.expand_as(values))


def _flat_value(order: str, x: Coordinates, axis: int, seed: int) -> Float[Tensor, "b n"]:
    """The number per token that the flat orders sort by."""
    if order == "axis":
        if not 0 <= axis < x.shape[2]:
            reject("axis", f"an axis of x, 0 to {x.shape[2] - 1}", axis)
        return x[..., axis]
    if order == "random":
        return _fixed_noise("uniform", x.shape[1], seed, x.device, torch.float32).expand(x.shape[:2])
    return x @ _fixed_noise("normal", x.shape[2], seed, x.device, x.dtype)


@lru_cache(maxsize=64)
def _fixed_noise(kind: str, size: int, seed: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, " size"]:
    """Random numbers, the same on every device. Cached on the device, since a CUDA graph cannot copy them there."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        drawn = torch.rand(size, generator=generator) if kind == "uniform" else torch.randn(size, generator=generator)
        return drawn.to(device, dtype)


def _masked_last(permutation: Permutation, mask: Tensor | None) -> Permutation:
    """The permutation with real tokens first, in their order (stable)."""
    if mask is None:
        return permutation
    return permutation.gather(1, (~mask.gather(1, permutation)).to(torch.int8).argsort(dim=1, stable=True))


def _recursive_order(x: Coordinates, mask: Tensor | None, branch: int, split_key: SplitKey) -> Permutation:
    """Split every segment into `branch` equal parts by `split_key`, level after level (k-d and ball trees)."""
    b, n, dx = x.shape
    permutation = _masked_last(torch.arange(n, device=x.device).expand(b, n), mask)
    lengths = x.new_full((b, 1), n, dtype=torch.int64) if mask is None else mask.sum(dim=1, keepdim=True)
    ranks = torch.arange(n, device=x.device).expand(b, n)
    for level in range(tree_depth(n, branch)):
        segments = branch**level
        # A row whose own tree is no deeper than this keeps its order: the split would fall inside a leaf block.
        active = (segments * branch < lengths) & (ranks < lengths)
        # Padding keeps a segment of its own behind all others, so it never moves.
        segment = torch.where(ranks < lengths, segment_of_rank(ranks, lengths, segments), segments)
        x_now = x.gather(1, permutation[..., None].expand(b, n, dx))
        value = torch.where(active, split_key(x_now, segment, level), 0)
        by_value = value.argsort(dim=1, stable=True)
        move = by_value.gather(1, segment.gather(1, by_value).argsort(dim=1, stable=True))
        permutation = permutation.gather(1, move)
    return permutation


def _cycling_axis(x: Tensor, segment: Tensor, level: int) -> Float[Tensor, "b n"]:
    return x[..., level % x.shape[2]]


def _widest_axis(x: Tensor, segment: Tensor, level: int) -> Float[Tensor, "b n"]:
    spread = _reduce(x, segment, "amax") - _reduce(x, segment, "amin")  # (b, n, dx), the same within a segment
    return x.gather(2, spread.argmax(dim=2, keepdim=True))[..., 0]


def _farthest_pair(x: Tensor, segment: Tensor, level: int) -> Float[Tensor, "b n"]:
    """Project on the line through the point farthest from the centre and the point farthest from that one."""
    first = _farthest_from(x, segment, _reduce(x, segment, "mean"))
    second = _farthest_from(x, segment, first)
    return ((x - first) * (second - first)).sum(dim=2)


def _principal_direction(x: Tensor, segment: Tensor, level: int) -> Float[Tensor, "b n"]:
    """Project on the direction in which the tokens of a segment vary most, found by a few power iterations."""
    x = x if x.dtype.is_floating_point else x.double()
    centred = x - _reduce(x, segment, "mean")
    tiny = torch.finfo(x.dtype).tiny
    centred = centred / _reduce(centred.abs().amax(dim=2, keepdim=True), segment, "amax").clamp_min(tiny)
    direction = _farthest_from(centred, segment, torch.zeros_like(centred))
    for _ in range(POWER_ITERATIONS):
        direction = direction / direction.norm(dim=2, keepdim=True).clamp_min(tiny)
        direction = _reduce(centred * (centred * direction).sum(dim=2, keepdim=True), segment, "mean")
    return (centred * direction).sum(dim=2)


def _farthest_from(x: Tensor, segment: Tensor, point: Tensor) -> Tensor:
    """Per segment, its token farthest from `point`, repeated for every token of the segment."""
    distance = (x - point).square().sum(dim=2, keepdim=True)
    is_farthest = distance >= _reduce(distance, segment, "amax")
    rank = torch.arange(x.shape[1], device=x.device)[None, :, None]
    first = _reduce(torch.where(is_farthest, rank, x.shape[1]).to(torch.int64), segment, "amin")
    return x.gather(1, first.expand_as(x))


def _reduce(x: Tensor, segment: Tensor, how: str) -> Tensor:
    """Reduce x (b, n, c) within segments; every token gets the result of its segment."""
    index = segment[..., None].expand_as(x)
    size = x.shape[1] + 1
    reduced = x.new_zeros(x.shape[0], size, x.shape[2]).scatter_reduce(1, index, x, how, include_self=False)
    return reduced.gather(1, index)


@dataclass(frozen=True)
class LeafLayout:
    """Token of every leaf slot: `index` into the tokens, and `real`, False at padding."""

    index: Int[Tensor, "b leaves"]
    real: Bool[Tensor, "b leaves"]


def leaf_layout(plan: TreePlan, lengths: Int[Tensor, " b"]) -> LeafLayout:
    """The layout when row i has its real tokens at 0..lengths[i]-1."""
    powers = plan.branch ** torch.arange(plan.depth + 1, device=lengths.device)
    depth = (powers[1:] < lengths[:, None]).sum(dim=1)  # each row's own depth: branch^d <= n - 1
    blocks = powers[depth][:, None]
    slot = torch.arange(plan.leaves, device=lengths.device)
    block, place = slot // plan.block, slot % plan.block
    start, stop = block * lengths[:, None] // blocks, (block + 1) * lengths[:, None] // blocks
    real = (block < blocks) & (place < stop - start)
    return LeafLayout(index=torch.where(real, start + place, 0), real=real)


def segment_of_rank(ranks: Int[Tensor, "b n"], lengths: Int[Tensor, "b 1"], segments: int) -> Int[Tensor, "b n"]:
    """Which of `segments` equal parts the token of each rank falls into, under the same even split."""
    return (segments * (ranks + 1) - 1) // lengths.clamp_min(1)
