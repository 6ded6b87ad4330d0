"""Leaf orders: permutations, against plain recursive k-d and ball trees on lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import ReTreever
from retreever.errors import InputError
from retreever.tree.order import ORDERS, Order, leaf_order, permutation_of
from retreever.tree.plan import TreePlan

properties = settings(max_examples=200, derandomize=True, deadline=None)
fewer = settings(properties, max_examples=40)
seeds = st.integers(0, 10_000)
Point = Sequence[float]
# Given (all points, the tokens of one segment, level), the value the segment is sorted by.
Key = Callable[[list[Point], list[int], int], Callable[[int], float]]


def points(seed: int, b: int, n: int, dx: int = 2, grid: bool = False) -> Tensor:
    """Random coordinates; on a small integer grid they tie often."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, dx, generator=generator, dtype=torch.float64)
    return (2 * x).round() if grid else x


def scattered_mask(seed: int, b: int, n: int) -> Tensor:
    """At least one real token per row, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(b, n, generator=generator) < 0.6
    mask[torch.arange(b), torch.randint(n, (b,), generator=generator)] = True
    return mask


def cycling(all_points: list[Point], tokens: list[int], level: int) -> Callable[[int], float]:
    return lambda token: all_points[token][level % len(all_points[token])]


def widest(all_points: list[Point], tokens: list[int], level: int) -> Callable[[int], float]:
    columns = list(zip(*(all_points[token] for token in tokens), strict=True))
    axis = max(range(len(columns)), key=lambda a: max(columns[a]) - min(columns[a]))
    return lambda token: all_points[token][axis]


def along_farthest_pair(all_points: list[Point], tokens: list[int], level: int) -> Callable[[int], float]:
    def farthest(origin: Point) -> Point:
        distance = {t: sum((p - o) ** 2 for p, o in zip(all_points[t], origin, strict=True)) for t in tokens}
        return all_points[max(tokens, key=lambda t: distance[t])]

    centre = [sum(column) / len(tokens) for column in zip(*(all_points[t] for t in tokens), strict=True)]
    first = farthest(centre)
    second = farthest(first)
    return lambda t: sum((p - f) * (s - f) for p, f, s in zip(all_points[t], first, second, strict=True))


RECURSIVE: dict[Order, Key] = {"kd": cycling, "kd-widest": widest, "ball": along_farthest_pair}


FACTORS = {2: [2], 3: [3], 4: [2, 2], 5: [5], 6: [2, 3], 8: [2, 2, 2]}


def recursive_order(x: Tensor, branch: int, key: Key) -> list[int]:
    """Sort, cut into equal parts, repeat in each part while it is more than one leaf block; a node is cut by primes."""
    all_points: list[Point] = x.tolist()
    n, factors = len(all_points), FACTORS[branch]

    def split(tokens: list[int], segment: int, segments: int, step: int) -> list[int]:
        if branch ** (1 + step // len(factors)) >= n:
            return tokens
        cut = factors[step % len(factors)]
        tokens = sorted(tokens, key=key(all_points, tokens, step))
        cuts = [(segment * cut + part) * n // (segments * cut) for part in range(cut + 1)]
        parts = [tokens[start - cuts[0] : stop - cuts[0]] for start, stop in pairwise(cuts)]
        children = [split(p, segment * cut + i, segments * cut, step + 1) for i, p in enumerate(parts)]
        return [token for child in children for token in child]

    return split(list(range(n)), 0, 1, 0)


@pytest.mark.parametrize("order", ORDERS)
@properties
@given(st.integers(1, 40), st.integers(1, 3), st.integers(2, 5), seeds)
def test_every_order_is_a_permutation_with_masked_tokens_last(
    order: Order, n: int, dx: int, branch: int, seed: int
) -> None:
    x, mask = points(seed, 2, n, dx, grid=seed % 2 == 0), scattered_mask(seed, 2, n)
    permutation = leaf_order(order, x, mask, branch=branch, seed=seed)
    assert permutation.sort(dim=1).values.tolist() == [list(range(n))] * 2
    real = mask.gather(1, permutation).to(torch.int8)
    assert bool((real.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("order", RECURSIVE)
@pytest.mark.parametrize("grid", [False, True], ids=["scattered", "ties"])
@properties
@given(st.integers(1, 40), st.sampled_from(list(FACTORS)), seeds)
def test_recursive_orders_equal_a_plain_recursion(order: Order, grid: bool, n: int, branch: int, seed: int) -> None:
    x = points(seed, 2, n, grid=grid)
    expected = [recursive_order(row, branch, RECURSIVE[order]) for row in x]
    assert leaf_order(order, x, branch=branch).tolist() == expected


@properties
@given(st.integers(1, 40), st.sampled_from(list(FACTORS)), seeds)
def test_on_a_line_the_blocks_of_a_plain_recursion_come_out_of_one_sort(n: int, branch: int, seed: int) -> None:
    x = points(seed, 1, n, dx=1)
    orders = [leaf_order(order, x, branch=branch)[0].tolist() for order in RECURSIVE]
    assert orders == [x[0, :, 0].argsort().tolist()] * 3
    recursion, blocks = recursive_order(x[0], branch, cycling), TreePlan(n, branch).blocks
    cuts = [block * n // blocks for block in range(blocks + 1)]
    assert all(set(orders[0][start:stop]) == set(recursion[start:stop]) for start, stop in pairwise(cuts))


@pytest.mark.parametrize("order", ORDERS)
@properties
@given(st.integers(1, 30), st.integers(2, 4), seeds)
def test_a_ragged_row_is_ordered_as_if_alone(order: Order, n: int, branch: int, seed: int) -> None:
    x, mask = points(seed, 3, n), scattered_mask(seed, 3, n)
    if order == "random":  # drawn by position: the same row alone has its tokens in front
        mask = mask.sort(dim=1, descending=True).values
    permutation = leaf_order(order, x, mask, branch=branch, seed=seed)
    for row in range(3):
        tokens = mask[row].nonzero()[:, 0]
        alone = leaf_order(order, x[row : row + 1, tokens], branch=branch, seed=seed)[0]
        assert torch.equal(permutation[row, : len(tokens)], tokens[alone])


@pytest.mark.parametrize("branch", [2, 3])
@pytest.mark.parametrize("n", [5, 16, 37])
def test_kd_cuts_every_node_at_the_median_of_its_axis(n: int, branch: int) -> None:
    """On every level, a left child's tokens are never beyond a right sibling's on the axis of that level."""
    x = points(seed=n, b=1, n=n)
    ordered = x[0, leaf_order("kd", x, branch=branch)[0]]
    for level in range(TreePlan(n, branch).depth):
        segments = branch ** (level + 1)
        cuts = [part * n // segments for part in range(segments + 1)]
        parts = [ordered[start:stop, level % 2] for start, stop in pairwise(cuts)]
        for left in (part for part in range(segments - 1) if (part + 1) % branch):
            assert parts[left].max() <= parts[left + 1].min()


@pytest.mark.parametrize("branch", [4, 16])
def test_cells_of_many_children_are_as_round_as_those_of_two(branch: int) -> None:
    """A node is cut by halves, along both axes: slices of one axis would be long and thin."""
    x = points(seed=1, b=1, n=256)
    blocks = [leaf_order("kd", x, branch=b).view(-1, branch).sort(dim=1).values.tolist() for b in (branch, 2)]
    assert blocks[0] == blocks[1]


def test_kd_widest_cuts_the_long_side() -> None:
    x = torch.stack([torch.arange(8.0) % 2, torch.tensor([9.0, 0, 8, 1, 7, 2, 6, 3])], dim=1)[None]
    left = x[0, leaf_order("kd-widest", x)[0, :4], 1]
    assert sorted(left.tolist()) == [0, 1, 2, 3]


def test_ball_cuts_across_a_diagonal_that_no_axis_shows() -> None:
    """Two balls along the diagonal: the halves are the balls."""
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x = torch.cat([corner + 10, corner])[None]
    halves = leaf_order("ball", x)[0].view(2, 4).sort(dim=1).values.tolist()
    assert sorted(halves) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axis_sorts_by_its_coordinate(axis: int) -> None:
    x = points(seed=1, b=2, n=20, dx=3)
    permutation = leaf_order("axis", x, axis=axis)
    assert torch.equal(x[..., axis].gather(1, permutation), x[..., axis].sort(dim=1).values)


def test_axis_keeps_the_given_order_of_ties() -> None:
    assert leaf_order("axis", torch.tensor([[[1.0], [0.0], [1.0], [0.0]]])).tolist() == [[1, 3, 0, 2]]


def test_given_keeps_the_order() -> None:
    mask = torch.tensor([[True, False, True, True]])
    assert leaf_order("given", torch.zeros(1, 4, 1)).tolist() == [[0, 1, 2, 3]]
    assert leaf_order("given", torch.zeros(1, 4, 1), mask).tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("order", ["random", "projection"])
def test_drawn_orders_follow_from_their_seed(order: Order) -> None:
    x = points(seed=0, b=2, n=32, dx=3)
    torch.manual_seed(5)
    first = leaf_order(order, x, seed=3)
    after = torch.rand(1)
    torch.manual_seed(6)
    assert torch.equal(first, leaf_order(order, x, seed=3))
    assert not torch.equal(first, leaf_order(order, x, seed=4))
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the global generator is left alone


def test_projection_sorts_along_one_line() -> None:
    """Points on a line come out in order along it, forwards or backwards."""
    x = torch.tensor([3.0, 0.0, 2.0, 1.0])[None, :, None] * torch.tensor([1.0, 2.0])
    assert leaf_order("projection", x)[0].tolist() in ([1, 3, 2, 0], [0, 2, 3, 1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_coordinates_of_masked_tokens_are_never_read(order: Order, garbage: float) -> None:
    x, mask = points(seed=2, b=3, n=11), scattered_mask(2, 3, 11)
    spoiled = x.masked_fill(~mask[..., None], garbage)
    clean, dirty = leaf_order(order, x, mask), leaf_order(order, spoiled, mask)
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        assert torch.equal(clean[row, :length], dirty[row, :length])


def families(permutation: Tensor, branch: int, levels: int) -> list[set[frozenset[int]]]:
    """The tokens below the nodes of every level, whichever comes first."""
    tokens, n = permutation.tolist(), len(permutation)
    found = []
    for segments in (branch**level for level in range(1, levels + 1)):
        cuts = [part * n // segments for part in range(segments + 1)]
        found.append({frozenset(tokens[start:stop]) for start, stop in pairwise(cuts)})
    return found


def nested_balls(seed: int, branch: int, dx: int) -> Tensor:
    """`branch` far balls of `branch` near balls of `branch` points each, on two lines, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    lines = torch.linalg.qr(torch.randn(dx, dx, generator=generator, dtype=torch.float64))[0][:2]
    far, near = (torch.arange(branch**3) // branch**2 * 100.0, torch.arange(branch**3) // branch % branch * 10.0)
    x = torch.stack([far, near], dim=1).double() @ lines + torch.rand(branch**3, dx, generator=generator) / dx
    return x[torch.randperm(len(x), generator=generator)]


@fewer
@given(st.integers(2, 4), st.integers(2, 12), seeds)
def test_principal_finds_balls_within_balls_in_any_direction(branch: int, dx: int, seed: int) -> None:
    """In many coordinates, none of which shows them."""
    x = nested_balls(seed, branch, dx)
    found = families(leaf_order("principal", x[None], branch=branch)[0], branch, 2)
    for size, got in zip((100, 10), found, strict=True):
        for group in got:
            points_ = x[sorted(group)]
            assert float(torch.cdist(points_, points_).max()) < size


@fewer
@given(st.integers(1, 40), st.integers(2, 6), st.integers(2, 4), seeds)
def test_principal_does_not_see_turns_shifts_or_sizes(n: int, dx: int, branch: int, seed: int) -> None:
    """Which half comes first may change, what is in it may not."""
    x = points(seed, 1, n, dx)
    generator = torch.Generator().manual_seed(seed + 1)
    turn = torch.linalg.qr(torch.randn(dx, dx, generator=generator, dtype=torch.float64))[0]
    levels = TreePlan(n, branch).depth
    expected = families(leaf_order("principal", x, branch=branch)[0], branch, levels)
    for moved in (x @ turn, x + 3, 1024 * x, -x):
        assert families(leaf_order("principal", moved, branch=branch)[0], branch, levels) == expected


@pytest.mark.parametrize("order", ["kd-widest", "ball", "principal"])
@pytest.mark.parametrize("exponent", [-40, -20, 20, 40, 56])
def test_units_of_coordinates_do_not_matter(order: Order, exponent: int) -> None:
    """Up to the largest that are accepted: a picture in nanometres is ordered like one in metres."""
    x = points(seed=3, b=1, n=30, dx=3).float()
    assert torch.equal(leaf_order(order, x * 2.0**exponent), leaf_order(order, x))


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_principal_orders_half_precision(dtype: torch.dtype, scale: float) -> None:
    """Keys of a model in half precision: balls far apart are found, whatever their size."""
    x = (nested_balls(0, 2, 8) * scale / 50)[None].to(dtype)
    found = families(leaf_order("principal", x)[0], 2, 1)
    assert found == families(leaf_order("principal", x.double())[0], 2, 1)


@pytest.mark.parametrize("branch", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_principal_takes_points_that_are_all_the_same(n: int, branch: int) -> None:
    """There is nothing to sort by: the order given stays, also among copies in an order of others."""
    for value in (0.0, -2.5, 1e6):
        assert leaf_order("principal", torch.full((2, n, 3), value), branch=branch).tolist() == [list(range(n))] * 2
    copies = points(seed=4, b=1, n=1, dx=3).expand(1, n, 3)
    mixed = torch.cat([copies, copies + 10], dim=1)
    halves = families(leaf_order("principal", mixed)[0], 2, 1)[0]
    assert halves == {frozenset(range(n)), frozenset(range(n, 2 * n))}


@fewer
@given(st.integers(2, 70), st.integers(2, 3), st.integers(2, 90), seeds)
def test_principal_sorts_segments_by_their_first_component(n: int, branch: int, dx: int, seed: int) -> None:
    """Against the eigenvectors of every segment, whether it has more tokens than coordinates or fewer."""
    x = points(seed, 1, n, dx) * torch.tensor([100.0, *[1.0] * (dx - 1)])
    x = x @ torch.linalg.qr(points(seed + 1, 1, dx, dx)[0])[0]
    tokens = x[0, leaf_order("principal", x, branch=branch)[0]]
    centred = tokens - tokens.mean(dim=0)
    along = centred @ torch.linalg.eigh(centred.mT @ centred)[1][:, -1]
    parts = [along[part * n // branch : (part + 1) * n // branch] for part in range(min(branch, n))]
    parts = parts if parts[0].mean() < parts[-1].mean() else parts[::-1]
    if TreePlan(n, branch).depth:
        assert all(left.max() <= right.min() for left, right in pairwise(parts))


@pytest.mark.parametrize("order", [*RECURSIVE, "principal"])
@pytest.mark.parametrize("n", [37, 64])
def test_numbers_that_are_none_still_give_a_permutation(order: Order, n: int) -> None:
    """Unchecked callers may pass them: no token is lost or read twice."""
    x = points(seed=5, b=2, n=n, dx=3)
    x[0, ::3], x[1, 1] = torch.nan, torch.inf
    for mask in (None, scattered_mask(5, 2, n)):
        permutation = permutation_of(order, x, mask, 2, 0, 0)
        assert permutation.sort(dim=1).values.tolist() == [list(range(n))] * 2


def test_autocast_does_not_coarsen_the_order() -> None:
    x = points(seed=6, b=1, n=200, dx=16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = leaf_order("principal", x)
    assert torch.equal(found, leaf_order("principal", x))


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "given"])
def test_coordinates_may_be_integers(order: Order) -> None:
    """Pixels of a picture."""
    x = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(8), indexing="ij"), dim=-1).reshape(1, 32, 2)
    assert torch.equal(leaf_order(order, x).sort(dim=1).values, torch.arange(32)[None])


@pytest.mark.parametrize(
    ("argument", "order", "settings_"),
    [
        ("order", "hilbert", {}),
        ("axis", "axis", {"axis": 2}),
        ("axis", "axis", {"axis": -1}),
        ("branch", "kd", {"branch": 1}),
    ],
)
def test_unusable_orders_are_refused_by_name(argument: str, order: str, settings_: dict[str, int]) -> None:
    with pytest.raises(InputError, match=rf"^{argument}: expected"):
        leaf_order(order, torch.zeros(1, 4, 2), **settings_)


@pytest.mark.parametrize("order", ["projection", "random"])
def test_what_inference_drew_can_be_trained_with(order: Order) -> None:
    """Numbers kept from a call under inference_mode once could not be saved for a gradient."""
    model = ReTreever(dim_x=2, dim=16, heads=2, layers=1, hidden=16, order=order, order_seed=9_001)
    xc, yc, xt = torch.randn(1, 5, 2, requires_grad=True), torch.randn(1, 5, 1), torch.randn(1, 2, 2)
    with torch.inference_mode():
        model.predict(xc, yc, xt)
    model.predict(xc, yc, xt).mean.sum().backward()
