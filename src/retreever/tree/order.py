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
from itertools import accumulate
from operator import mul
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_choice, check_int, reject
from retreever.batch import without_padding
from retreever.checks import check_finite, check_mask, check_same, check_tensor
from retreever.tree.plan import TreePlan, tree_depth

Order = Literal["given", "axis", "kd", "kd-widest", "ball", "principal", "random", "projection"]
ORDERS: tuple[Order, ...] = get_args(Order)
POWER_ITERATIONS = 4
Coordinates = Float[Tensor, "b n dx"]
Permutation = Int[Tensor, "b n"]
Segments = Float[Tensor, "b s w dx"]
Values = Float[Tensor, "b s w"]
# Given (coordinates by segments, which of them are real, level), the value each segment is sorted by.
SplitValue = Callable[[Segments, Bool[Tensor, "b s w"] | None, int], Values]


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
        branch: children per node of the tree; recursive orders split into as many parts, by halves where they can.
        axis: the coordinate of "axis".
        seed: of "random" and "projection".
    """
    check_choice("order", order, ORDERS)
    check_tensor("x", x, "b n dx")
    check_int("branch", branch, 2)
    check_int("seed", seed, 0)
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
    values: dict[str, SplitValue] = {
        "kd": _cycling_axis,
        "kd-widest": _widest_axis,
        "ball": _farthest_pair,
        "principal": _principal_direction,
    }
    return _recursive_order(x, mask, branch, values[order])


def in_order(values: Tensor, permutation: Int[Tensor, "b k"]) -> Tensor:
    """values (b, n, ...) with the tokens of every row in the order of `permutation`, copied row by row."""
    first = values.shape[1] * torch.arange(values.shape[0], device=values.device)[:, None]
    picked = values.flatten(0, 1).index_select(0, (permutation + first).flatten())
    return picked.view(*permutation.shape, *values.shape[2:])


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


@torch.no_grad()
def _recursive_order(x: Coordinates, mask: Tensor | None, branch: int, split_value: SplitValue) -> Permutation:
    """Split every segment into `branch` equal parts by `split_value`, level after level (k-d and ball trees).

    A split into 8 is three into 2: cells stay round, where eight slices of one axis would be long and thin.
    """
    b, n, dx = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else torch.float64
    x = x.to(dtype).contiguous()
    permutation = _masked_last(torch.arange(n, device=x.device).expand(b, n), mask)
    lengths = None if mask is None else mask.sum(dim=1)[:, None]
    for step, (segments, leaf) in enumerate(_splits(tree_depth(n, branch), branch)):
        place, real = _segments(n, lengths, segments, x.device)
        tokens = permutation.gather(1, place.flatten(1).expand(b, -1)).view(b, *place.shape[1:])
        grouped = in_order(x, tokens.flatten(1)).view(*tokens.shape, dx)
        with torch.autocast(x.device.type, enabled=False):
            value = split_value(grouped, real, step)
        del grouped  # what a split frees, the next one uses again
        if real is not None:
            value = value.nan_to_num().masked_fill(~real, torch.inf)
        moved = tokens.gather(2, value.argsort(dim=2, stable=True)).flatten(1)
        if real is not None:
            # A row whose own tree is no deeper than this keeps its order: the split would fall inside a leaf block.
            moves = real if lengths is None else real & (leaf < lengths)[..., None]
            target = torch.where(moves, place, n).flatten(1).expand(b, -1)  # column n is for what does not move
            moved = F.pad(permutation, (0, 1)).scatter(1, target, moved)[:, :n]
        permutation = moved
    return permutation


def _splits(depth: int, branch: int) -> list[tuple[int, int]]:
    """For every split, how many segments there are before it, and how many after the level it belongs to."""
    factors = _prime_factors(branch)
    before = list(accumulate(factors * depth, mul, initial=1))[:-1]
    return [(segments, branch ** (1 + step // len(factors))) for step, segments in enumerate(before)]


def _prime_factors(number: int) -> list[int]:
    smallest = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [] if smallest is None else [smallest, *_prime_factors(number // smallest)]


def _segments(
    n: int, lengths: Int[Tensor, "b 1"] | None, segments: int, device: torch.device
) -> tuple[Int[Tensor, "b s w"], Bool[Tensor, "b s w"] | None]:
    """Ranks of the tokens of all segments, which differ by at most one in size, and which of them are real.

    Slots behind the last token of a segment repeat it; None where there are none.
    """
    width = -(-n // segments)
    if lengths is None and width * segments == n:
        return torch.arange(n, device=device).view(1, segments, width), None
    bounds = torch.arange(segments + 1, device=device) * (n if lengths is None else lengths) // segments
    start, stop = bounds.view(-1, segments + 1, 1)[:, :-1], bounds.view(-1, segments + 1, 1)[:, 1:]
    place = start + torch.arange(width, device=device)
    return torch.minimum(place, stop - 1).clamp_min(0), place < stop


def _cycling_axis(x: Segments, real: Tensor | None, level: int) -> Values:
    return x[..., level % x.shape[3]]


def _widest_axis(x: Segments, real: Tensor | None, level: int) -> Values:
    widest = (x.amax(dim=2, keepdim=True) - x.amin(dim=2, keepdim=True)).argmax(dim=3, keepdim=True)
    return x.gather(3, widest.expand(*x.shape[:3], 1))[..., 0]


def _farthest_pair(x: Segments, real: Tensor | None, level: int) -> Values:
    """Project on the line through the point farthest from the centre and the point farthest from that one."""
    first = _farthest(x, (x - _mean(x, real)).square().sum(dim=3))
    second = _farthest(x, (x - first).square().sum(dim=3))
    return ((x - first) * (second - first)).sum(dim=3)


def _principal_direction(x: Segments, real: Tensor | None, level: int) -> Values:
    """Project on the direction in which the tokens of a segment vary most, found by a few power iterations.

    In narrow segments the products of all pairs of tokens are fewer numbers than the tokens and take their place.
    """
    centred = x.sub_(_mean(x, real))
    if real is not None:
        centred.mul_(real[..., None])
    distance = torch.linalg.vector_norm(centred, dim=3)
    # The farthest at distance 1: the iterations multiply by at least 1 and at most the number of tokens.
    centred.div_(distance.amax(dim=2)[..., None, None].clamp_min(torch.finfo(x.dtype).tiny))
    if 2 * x.shape[2] <= x.shape[3]:
        products = centred @ centred.mT
        value = _farthest(products, distance)
        for _ in range(POWER_ITERATIONS):
            value = (value * products).sum(dim=3)[:, :, None]
        return value[:, :, 0]
    direction = _farthest(centred, distance)
    for _ in range(POWER_ITERATIONS):
        direction = direction @ centred.mT @ centred
    return (direction @ centred.mT)[:, :, 0]


def _farthest(x: Segments, distance: Values) -> Float[Tensor, "b s 1 dx"]:
    """Row of `x` at the largest distance in every segment, the first of equals."""
    far = distance.argmax(dim=2)[..., None, None]
    return x.gather(2, far.expand(*x.shape[:2], 1, x.shape[3]))


def _mean(x: Segments, real: Tensor | None) -> Float[Tensor, "b s 1 dx"]:
    if real is None:
        return x.mean(dim=2, keepdim=True)
    count = real.sum(dim=2)[..., None, None].clamp_min(1)
    return (x * real[..., None]).sum(dim=2, keepdim=True) / count


@dataclass(frozen=True)
class LeafLayout:
    """Token of every leaf slot: `index` into the tokens, and `real`, False at padding."""

    index: Int[Tensor, "b leaves"]
    real: Bool[Tensor, "b leaves"]


def leaf_layout(plan: TreePlan, lengths: Int[Tensor, " b"]) -> LeafLayout:
    """The layout when row i has its real tokens at 0..lengths[i]-1."""
    level = torch.arange(plan.depth + 1, device=lengths.device)
    powers = torch.where(level[:, None] > level, plan.branch, 1).prod(dim=1)  # AOTInductor takes `**` for floats
    depth = (powers[1:] < lengths[:, None]).sum(dim=1)  # each row's own depth: branch^d <= n - 1
    blocks = powers[depth][:, None].clamp_min(1)  # compiled code may also divide in lanes that it throws away
    slot = torch.arange(plan.leaves, device=lengths.device)
    block, place = slot // plan.block, slot % plan.block
    start, stop = block * lengths[:, None] // blocks, (block + 1) * lengths[:, None] // blocks
    real = (block < blocks) & (place < stop - start)
    return LeafLayout(index=torch.where(real, start + place, 0), real=real)
