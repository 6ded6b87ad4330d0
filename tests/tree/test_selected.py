"""The selected set: every real leaf lies under exactly one selected node, and the count is the closed formula."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever.tree.aggregate import MeanAggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan
from retreever.tree.selected import leaf_nodes, nodes_scored, path_nodes, selected_nodes

EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "200"))
properties = settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
fewer = settings(properties, max_examples=EXAMPLES // 3)


def tokens_read(plan: TreePlan, path: Tensor, node_mask: Tensor | None = None) -> Tensor:
    return (selected_nodes(plan, path, node_mask) >= 0).sum(dim=-1)


def all_paths(plan: TreePlan, b: int = 1) -> Tensor:
    return torch.arange(plan.blocks).expand(b, -1)


def ragged_tree(lengths: list[int], branch: int) -> tuple[TreePlan, Tensor]:
    """Plan and node mask of a batch whose rows have that many tokens."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    plan, _, node_mask = build_nodes(torch.zeros(*mask.shape, 1), MeanAggregator(), branch, mask)
    assert node_mask is not None
    return plan, node_mask


def leaves_under(plan: TreePlan, node: int) -> list[int]:
    """Leaf slots below a row of the flat node tensor, by walking down."""
    if node >= plan.leaf_offset:
        return [node - plan.leaf_offset]
    level = next(lv for lv in range(1, plan.depth + 1) if node < plan.offsets[lv + 1])
    place = node - plan.offsets[level]
    if level == plan.depth:
        children = [plan.leaf_offset + place * plan.block + slot for slot in range(plan.block)]
    else:
        children = [plan.offsets[level + 1] + place * plan.branch + child for child in range(plan.branch)]
    return [leaf for child in children for leaf in leaves_under(plan, child)]


def assert_partition(plan: TreePlan, selected: Tensor, real_leaves: set[int], real: set[int]) -> None:
    """`selected` (s,) covers each real leaf exactly once and holds real nodes only."""
    chosen = [node for node in selected.tolist() if node >= 0]
    assert set(chosen) <= real
    covered = [leaf for node in chosen for leaf in leaves_under(plan, node) if leaf in real_leaves]
    assert sorted(covered) == sorted(real_leaves)


@properties
@given(st.integers(2, 7), st.data())
def test_the_selected_set_of_every_path_partitions_the_real_leaves(branch: int, data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 40), "longest")
    shorter = data.draw(st.lists(st.integers(1, longest), max_size=2), "shorter")
    plan, node_mask = ragged_tree([longest, *shorter], branch)
    path = all_paths(plan, len(node_mask))
    selected, counts = selected_nodes(plan, path, node_mask), tokens_read(plan, path, node_mask)
    ends = node_mask[:, plan.leaf_offset :].view(len(node_mask), plan.blocks, plan.block).any(dim=2)
    for row, mask in enumerate(node_mask):
        real = set(mask.nonzero()[:, 0].tolist())
        leaves = {node - plan.leaf_offset for node in real if node >= plan.leaf_offset}
        for end in ends[row].nonzero()[:, 0].tolist():  # a search only ends in blocks with tokens
            assert_partition(plan, selected[row, end], leaves, real)
            assert int(counts[row, end]) == sum(node >= 0 for node in selected[row, end].tolist())


@properties
@given(st.integers(2, 7), st.integers(1, 2), st.data())
def test_a_full_tree_reads_exactly_the_closed_formula(branch: int, depth: int, data: st.DataObject) -> None:
    """Blocks filled to the last slot: (k - 1) * depth + P nodes for every path, all different, all leaves once."""
    block = data.draw(st.integers(2, branch), "block")
    plan = TreePlan(block * branch**depth, branch)
    assert plan.full and plan.depth == depth
    selected = selected_nodes(plan, all_paths(plan))
    assert selected.shape == (1, plan.blocks, (branch - 1) * depth + block)
    assert bool((tokens_read(plan, all_paths(plan)) == plan.tokens).all())
    for path in range(plan.blocks):
        assert_partition(plan, selected[0, path], set(range(plan.leaves)), set(range(plan.nodes)))
        assert len(set(selected[0, path].tolist())) == plan.tokens


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "branch"), [(1, 2), (2, 2), (3, 4), (5, 5)])
def test_without_a_decision_all_leaves_are_selected(n: int, branch: int, masked: bool) -> None:
    plan, node_mask = ragged_tree([n, 1], branch) if masked else (TreePlan(n, branch), None)
    path = torch.zeros(2, 3, dtype=torch.int64)
    selected = selected_nodes(plan, path, node_mask)
    assert selected.dtype == torch.int64
    assert selected[0].tolist() == [list(range(n))] * 3
    expected = [[n] * 3, [1 if masked else n] * 3]
    assert tokens_read(plan, path, node_mask).tolist() == expected
    assert nodes_scored(plan, path, node_mask).tolist() == [[0] * 3] * 2


def test_the_set_of_a_small_tree_by_hand() -> None:
    """Eight leaves in pairs: rows 0 1 | 2 3 4 5 | leaves 6..13. Path 2 goes right, then left."""
    plan = TreePlan(8)
    path = torch.tensor([[2, 0]])
    assert path_nodes(plan, path).tolist() == [[[1, 4], [0, 2]]]
    assert selected_nodes(plan, path).tolist() == [[[0, 5, 10, 11], [1, 3, 6, 7]]]
    assert nodes_scored(plan, path).tolist() == [[4, 4]]


def test_padding_is_marked_and_never_counted() -> None:
    """Three tokens in a tree made for eight: the row's own tree is the left half, so the right half is -1."""
    plan, node_mask = ragged_tree([8, 3], branch=2)
    path = torch.tensor([[1, 1], [0, 1]])
    assert selected_nodes(plan, path, node_mask)[1].tolist() == [[-1, 3, 6, -1], [-1, 2, 8, 9]]
    assert tokens_read(plan, path, node_mask).tolist() == [[4, 4], [2, 3]]


def test_reading_everything_selects_all_real_leaves() -> None:
    plan, node_mask = ragged_tree([8, 3], branch=2)
    path = torch.zeros(2, 1, dtype=torch.int64)
    assert leaf_nodes(plan, path).tolist() == [[list(range(6, 14))]] * 2
    assert leaf_nodes(plan, path, node_mask).tolist() == [[list(range(6, 14))], [[6, -1, 8, 9, -1, -1, -1, -1]]]


@fewer
@given(st.integers(2, 5), st.data())
def test_a_shorter_row_costs_what_it_would_alone(branch: int, data: st.DataObject) -> None:
    longest = data.draw(st.integers(2 * branch, 30), "longest")
    n = data.draw(st.integers(1, longest), "n")
    plan, node_mask = ragged_tree([longest, n], branch)
    own, own_mask = ragged_tree([n], branch)
    here, alone = all_paths(own, 2), all_paths(own)
    for cost in (tokens_read, nodes_scored):
        assert torch.equal(cost(plan, here, node_mask)[1], cost(own, alone, own_mask)[0])


@pytest.mark.parametrize(("n", "branch", "scored"), [(16, 2, 6), (27, 3, 6), (64, 4, 8)])
def test_the_policy_scores_all_children_of_every_decision(n: int, branch: int, scored: int) -> None:
    plan = TreePlan(n, branch)
    assert bool((nodes_scored(plan, all_paths(plan)) == scored).all())
    assert scored == branch * plan.depth
