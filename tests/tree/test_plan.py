"""The integer shape of the tree, against definitions that count instead of calculate."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from retreever.errors import InputError
from retreever.tree.plan import TreePlan, tree_depth


def depth_by_splitting(n: int, branch: int) -> int:
    """Split into `branch` parts until the largest part fits one block: how often that took."""
    return 0 if n <= branch else 1 + depth_by_splitting(-(-n // branch), branch)


def assert_shape_by_counting(n: int, branch: int) -> None:
    """Every figure of the plan, from the number of nodes on each level written out one by one."""
    plan = TreePlan(n, branch)
    depth = depth_by_splitting(n, branch)
    levels = [1]
    for _ in range(depth):
        levels.append(levels[-1] * branch)
    block = -(-n // levels[-1])
    starts = [sum(levels[1:level]) for level in range(1, depth + 2)]
    assert (plan.depth, plan.blocks, plan.block) == (depth, levels[-1], block)
    assert [plan.offsets[level] for level in range(1, depth + 2)] == starts
    assert (plan.leaf_offset, plan.leaves) == (starts[-1], levels[-1] * block)
    assert plan.nodes == sum(levels[1:]) + levels[-1] * block
    assert plan.tokens == sum(branch - 1 for _ in range(depth)) + block
    assert plan.full == (levels[-1] * block == n)


def edge_lengths(branch: int, limit: int = 1_000_000) -> list[int]:
    """Lengths around every power of `branch`, and the largest ones."""
    powers = [branch**exponent for exponent in range(1, 21) if branch**exponent <= limit]
    near = {length for power in powers for length in (power - 1, power, power + 1, power + 2)}
    return sorted(length for length in near | {limit - 1, limit} if 1 <= length <= limit)


@pytest.mark.parametrize("branch", range(2, 17))
def test_shape_equals_counting_for_every_small_length(branch: int) -> None:
    for n in range(1, 2001):
        assert_shape_by_counting(n, branch)


def test_shape_equals_counting_around_powers_up_to_a_million() -> None:
    for branch in range(2, 65):
        for n in edge_lengths(branch):
            assert_shape_by_counting(n, branch)


def test_depth_is_exact_where_float_logarithms_fail() -> None:
    for branch in range(2, 65):
        for exponent in range(1, 40):
            power = branch**exponent
            assert [tree_depth(n, branch) for n in (power, power + 1)] == [exponent - 1, exponent]


def test_a_block_never_holds_more_than_one_group_of_children() -> None:
    for branch in range(2, 65):
        assert all(1 <= TreePlan(n, branch).block <= branch for n in edge_lengths(branch))


@pytest.mark.parametrize(
    ("n", "tokens"), [(64, 7), (128, 8), (256, 9), (512, 10), (47, 7), (197, 9), (50, 7), (1, 1), (2, 2), (3, 3)]
)
def test_tokens_of_binary_trees(n: int, tokens: int) -> None:
    assert TreePlan(n).tokens == tokens


@pytest.mark.parametrize(("branch", "tokens"), [(256, 256), (32, 39), (16, 31), (8, 18), (4, 13), (2, 9)])
def test_tokens_of_256_by_branch(branch: int, tokens: int) -> None:
    assert TreePlan(256, branch).tokens == tokens


@pytest.mark.parametrize("n", [1, 2, 7])
def test_no_decision_when_all_tokens_fit_one_block(n: int) -> None:
    plan = TreePlan(n, branch=7)
    assert (plan.depth, plan.blocks, plan.block, plan.nodes, plan.leaf_offset) == (0, 1, n, n, 0)
    assert plan.full


def test_a_wider_block_changes_leaves_only() -> None:
    """Ragged batches ask for whole blocks; levels stay where they were."""
    tight, wide = TreePlan(9, branch=4), TreePlan(9, branch=4, block=4)
    assert (tight.block, wide.block) == (3, 4)
    assert (wide.depth, wide.blocks, wide.leaf_offset) == (tight.depth, tight.blocks, tight.leaf_offset)
    assert (wide.leaves, wide.nodes, wide.tokens) == (16, 20, 7)
    assert not wide.full


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("n", {"n": 0}),
        ("n", {"n": -1}),
        ("n", {"n": 8.0}),
        ("n", {"n": True}),
        ("n", {"n": None}),
        ("branch", {"n": 8, "branch": 1}),
        ("branch", {"n": 8, "branch": 0}),
        ("branch", {"n": 8, "branch": -2}),
        ("branch", {"n": 8, "branch": 2.0}),
        ("block", {"n": 8, "block": 1}),
        ("block", {"n": 8, "block": -1}),
        ("block", {"n": 8, "block": "2"}),
    ],
)
def test_impossible_shapes_are_refused_by_name(argument: str, values: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"^{argument}: expected"):
        TreePlan(**values)


def test_a_plan_is_a_value() -> None:
    assert TreePlan(9, 4) == TreePlan(9, 4, block=3)
    assert hash(TreePlan(9, 4)) == hash(TreePlan(9, 4, block=3))
    assert TreePlan(9, 4) != TreePlan(9, 4, block=4)
    with pytest.raises(FrozenInstanceError):
        TreePlan(9).n = 10
