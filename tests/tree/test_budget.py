"""Reading budgets: how many nodes every level opens, counted by opening them one by one."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retreever.tree.aggregate import MeanAggregator
from retreever.tree.budget import level_widths, slots, spread
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan, tree_depth

EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "200"))
properties = settings(max_examples=EXAMPLES // 4, derandomize=True, deadline=None)
DEEPEST = {2: 9, 3: 5, 4: 4, 5: 3, 8: 3}
trees = st.sampled_from(sorted(DEEPEST)).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, DEEPEST[k])))
budgets = st.integers(1, 1500)


def tokens_left(branch: int, widths: tuple[int, ...]) -> int:
    """Tokens left in a full tree when every level opens that many of the nodes it was given."""
    given_, left = branch, 0
    for width in widths:
        assert width <= given_
        left, given_ = left + given_ - width, width * branch
    return left + given_


def one_path(branch: int, depth: int) -> int:
    return (branch - 1) * depth + branch


@properties
@given(trees, budgets)
def test_no_more_than_the_budget_is_read_and_no_less_than_one_path(tree: tuple[int, int], budget: int) -> None:
    branch, depth = tree
    widths = level_widths(branch, depth, budget)
    assert len(widths) == depth and all(width >= 1 for width in widths)
    assert tokens_left(branch, widths) <= max(budget, one_path(branch, depth))


@properties
@given(trees, budgets)
def test_the_budget_is_used_up(tree: tuple[int, int], budget: int) -> None:
    """What is left would not open another node, which adds branch - 1 tokens, unless all are open."""
    branch, depth = tree
    read = tokens_left(branch, level_widths(branch, depth, budget))
    assert read == branch ** (depth + 1) or budget - read < branch - 1


@properties
@given(trees, budgets)
def test_a_larger_budget_opens_no_fewer_nodes_on_any_level(tree: tuple[int, int], budget: int) -> None:
    less, more = level_widths(*tree, budget), level_widths(*tree, budget + 1)
    assert all(a <= b for a, b in zip(less, more, strict=True))


@properties
@given(trees, budgets)
def test_a_lower_level_opens_no_fewer_nodes_than_the_one_above(tree: tuple[int, int], budget: int) -> None:
    widths = level_widths(*tree, budget)
    assert list(widths) == sorted(widths)


@pytest.mark.parametrize("branch", DEEPEST)
def test_as_many_as_there_are_leaves_open_everything(branch: int) -> None:
    for depth in range(DEEPEST[branch] + 1):
        for spare in (0, 1, 10**9):
            widths = level_widths(branch, depth, branch ** (depth + 1) + spare)
            assert widths == tuple(branch**level for level in range(1, depth + 1))


@pytest.mark.parametrize("branch", DEEPEST)
def test_what_one_path_reads_opens_one_node_of_every_level(branch: int) -> None:
    for depth in range(DEEPEST[branch] + 1):
        path = one_path(branch, depth)
        assert level_widths(branch, depth, 1) == level_widths(branch, depth, path) == (1,) * depth
        more = level_widths(branch, depth, path + branch - 1)
        assert sum(more) == min(depth + 1, sum(branch**level for level in range(1, depth + 1)))


@properties
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(2, 5), st.integers(2, 70))
def test_a_shorter_context_spends_the_budget_as_if_alone(lengths: list[int], branch: int, budget: int) -> None:
    """Its own levels are the lowest; those above have one node to open. -1 is a context read whole."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    plan, _, node_mask = build_nodes(torch.zeros(*mask.shape, 1), MeanAggregator(), branch, mask)
    found = spread(plan, budget, node_mask)
    assert spread(plan, 1, node_mask)[:2] == ((*((1,) * plan.depth for _ in range(plan.depth + 1)),), None)  # one path
    assert found.own is not None
    depths = [tree_depth(n, branch) for n in lengths]
    assert found.own.tolist() == [-1 if n <= budget else own for n, own in zip(lengths, depths, strict=True)]
    for own in depths:
        assert found.table[own] == (1,) * (plan.depth - own) + level_widths(branch, own, budget)
        assert all(a <= b for a, b in zip(found.table[own], found.widest, strict=True))


@properties
@given(st.integers(1, 200), st.integers(2, 6), st.integers(1, 250))
def test_room_for_all_that_is_read_and_no_more_than_there_are_leaves(n: int, branch: int, budget: int) -> None:
    plan = TreePlan(n, branch)
    room = slots(plan, budget)
    assert min(budget, plan.leaves) <= room <= max(budget, plan.tokens) and room <= plan.leaves
