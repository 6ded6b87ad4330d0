"""Which token lies on which leaf: an even split on every level, and ragged rows as if they were alone."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retreever.tree.build import plan_for
from retreever.tree.order import LeafLayout, leaf_layout
from retreever.tree.plan import TreePlan

EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "150"))
properties = settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
branches = st.integers(2, 7)


def layout_of(plan: TreePlan, *lengths: int) -> LeafLayout:
    return leaf_layout(plan, torch.tensor(lengths))


def ragged_plan(longest: int, branch: int) -> TreePlan:
    return plan_for(longest, branch, True)


@properties
@given(st.integers(1, 300), branches)
def test_every_token_lies_on_exactly_one_leaf_and_in_order(n: int, branch: int) -> None:
    layout = layout_of(TreePlan(n, branch), n)
    assert layout.index[layout.real].tolist() == list(range(n))


@properties
@given(st.integers(1, 300), branches)
def test_split_is_even_on_every_level(n: int, branch: int) -> None:
    plan = TreePlan(n, branch)
    real = layout_of(plan, n).real[0]
    for level in range(plan.depth + 1):
        sizes = real.view(branch**level, -1).sum(dim=1)
        assert int(sizes.max() - sizes.min()) <= 1
        assert int(sizes.min()) >= 1  # so no inner node is made of padding alone


@properties
@given(st.integers(1, 300), branches)
def test_padding_stands_behind_the_tokens_of_its_block(n: int, branch: int) -> None:
    plan = TreePlan(n, branch)
    places = layout_of(plan, n).real[0].view(plan.blocks, plan.block).to(torch.int8)
    assert bool((places.diff(dim=1) <= 0).all())


@properties
@given(st.lists(st.integers(1, 80), min_size=1, max_size=4), branches)
def test_a_ragged_row_is_the_leftmost_subtree_it_would_be_alone(lengths: list[int], branch: int) -> None:
    plan = ragged_plan(max(lengths), branch)
    batch = layout_of(plan, *lengths)
    for row, n in enumerate(lengths):
        own = TreePlan(n, branch)
        alone = layout_of(own, n)
        width = max(plan.block, own.block)
        here = torch.zeros(plan.blocks, width, dtype=torch.bool)
        here[: own.blocks, : own.block] = alone.real.view(own.blocks, own.block)
        assert torch.equal(batch.real[row].view(plan.blocks, plan.block), here[:, : plan.block])
        assert not here[:, plan.block :].any()  # nothing of the row's own tree fell off the edge
        assert torch.equal(batch.index[row][batch.real[row]], alone.index[alone.real])


@pytest.mark.parametrize(("n", "tokens"), [(5, [0, -1, 1, -1, 2, -1, 3, 4]), (7, [0, -1, 1, 2, 3, 4, 5, 6])])
def test_odd_tokens_go_to_the_right(n: int, tokens: list[int]) -> None:
    """Block j of B holds tokens floor(j*n/B) up to floor((j+1)*n/B); -1 is padding."""
    layout = layout_of(TreePlan(n), n)
    assert torch.where(layout.real, layout.index, -1)[0].tolist() == tokens


def test_padding_slots_point_at_a_valid_token() -> None:
    layout = layout_of(ragged_plan(9, 3), 9, 4, 1)
    assert bool((layout.index >= 0).all())
    assert bool((layout.index < torch.tensor([[9], [4], [1]])).all())


def test_a_row_without_tokens_has_no_real_leaf() -> None:
    assert not layout_of(ragged_plan(5, 2), 5, 0).real[1].any()
