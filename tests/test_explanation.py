"""A search told step by step is the search that took place: the paper's example, and properties of any tree."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retreever.attention import TreeCrossAttention
from retreever.errors import InputError
from retreever.explanation import Explanation, children_of, descendants, explain, slots_of
from retreever.results import TreeCrossAttentionResult
from retreever.tree.build import plan_for
from retreever.tree.order import leaf_layout
from retreever.tree.plan import TreePlan


def searched(plan: TreePlan, path: int, length: int | None = None) -> TreeCrossAttentionResult:
    """A result whose only query took `path`, in a row of `length` tokens padded to the plan's."""
    zeros = torch.zeros(1, 1)
    mask = None if length is None and plan.full else node_mask(plan, length or plan.n)
    return TreeCrossAttentionResult(zeros[..., None], torch.tensor([[path]]), zeros, zeros, plan, mask, "policy")


def node_mask(plan: TreePlan, length: int) -> torch.Tensor:
    """Which nodes cover one of `length` tokens, by looking at every node's leaves."""
    real = leaf_layout(plan, torch.tensor([length])).real[0]
    return torch.tensor([[bool(real[slice(*slots_of(plan, node))].any()) for node in range(1, plan.nodes + 1)]])


def by_state(explanation: Explanation, step: int) -> dict[str, set[int]]:
    """The nodes in each state when `step` begins."""
    states = explanation.states(step)
    return {name: {node for node, state in enumerate(states) if state == name} for name in set(states)}


@st.composite
def searches(draw: st.DrawFn) -> tuple[TreeCrossAttentionResult, int]:
    """A search down to a real leaf block, and how many tokens the row has."""
    branch, n = draw(st.integers(2, 5)), draw(st.integers(1, 70))
    length = draw(st.integers(1, n))
    plan = plan_for(n, branch, length < n)
    real = leaf_layout(plan, torch.tensor([length])).real.view(plan.blocks, plan.block).any(dim=1)
    path = draw(st.sampled_from(real.nonzero().flatten().tolist()))
    return searched(plan, path, length if length < n else None), length


PAPER = explain(searched(TreePlan(8), path=1))
"""The appendix's example: a binary tree over eight tokens, the search going 0, 1, 4 and reading 9 and 10."""


def test_the_papers_selected_set() -> None:
    assert {selected.node for selected in PAPER.selected} == {2, 3, 9, 10}
    assert PAPER.leaves == (9, 10)


def test_the_papers_steps() -> None:
    told = [(step.node, step.children, step.chosen, step.rejected) for step in PAPER.steps]
    assert told == [(0, (1, 2), 1, (2,)), (1, (3, 4), 4, (3,)), (4, (9, 10), None, ())]


@pytest.mark.parametrize(
    ("step", "explored", "selected", "open_", "unexplored"),
    [
        (0, {0}, set(), set(range(1, 15)), set()),
        (1, {0, 1}, {2}, {3, 4, 7, 8, 9, 10}, {5, 6, 11, 12, 13, 14}),
        (2, {0, 1, 4}, {2, 3}, {9, 10}, {5, 6, 7, 8, 11, 12, 13, 14}),
        (3, {0, 1, 4}, {2, 3, 9, 10}, set(), {5, 6, 7, 8, 11, 12, 13, 14}),
    ],
)
def test_the_papers_colours(
    step: int, explored: set[int], selected: set[int], open_: set[int], unexplored: set[int]
) -> None:
    want = {"explored": explored, "selected": selected, "open": open_, "unexplored": unexplored}
    assert by_state(PAPER, step) == {name: nodes for name, nodes in want.items() if nodes}


def test_selected_nodes_say_which_tokens_they_stand_for() -> None:
    assert {selected.node: selected.tokens for selected in PAPER.selected} == {
        2: (4, 8),
        3: (0, 2),
        9: (2, 3),
        10: (3, 4),
    }


def test_it_reads_as_lines() -> None:
    assert str(PAPER).splitlines() == [
        "row 0, query 0: read 4 nodes for 8 tokens (50.0%), path probability 1",
        "step 0: explored 0, took 1, rejected 2",
        "step 1: explored 1, took 4, rejected 3",
        "step 2: explored 4, read leaves 9, 10",
        "selected: 2 (tokens 4-7), 3 (tokens 0-1), 9 (token 2), 10 (token 3)",
    ]


def test_json_is_plain_and_whole() -> None:
    told = PAPER.to_json()
    assert json.loads(json.dumps(told)) == told
    assert [step["node"] for step in told["steps"]] == [0, 1, 4]
    assert told["selected"][0] == {"node": 2, "slots": [4, 8], "tokens": [4, 8]}
    assert [len(states) for states in told["states"]] == [15] * 4
    assert (told["tokens"], told["tokens_read"], told["padding"]) == (8, 4, [])


def test_a_wide_tree_with_small_blocks_keeps_ids_apart() -> None:
    """Branch 4 over 8 tokens: level 1 is 1..4 and the leaves, two per block, are 5..12."""
    told = explain(searched(TreePlan(8, 4), path=2))
    assert [(step.node, step.chosen, step.rejected) for step in told.steps] == [(0, 3, (1, 2, 4)), (3, None, ())]
    assert told.leaves == (9, 10)


def test_padding_is_never_rejected_read_or_open() -> None:
    """Five tokens in a tree for thirteen: one side of the root is padding, so that step decides nothing."""
    told = explain(searched(plan_for(13, 2, True), path=1, length=5))
    assert (told.steps[0].children, told.steps[0].rejected) == ((1,), ())
    assert "took its only child 1" in str(told)
    padding = {node for node, real in enumerate(told.real) if not real}
    assert padding and padding <= by_state(told, 0)["unexplored"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_without_a_decision_all_leaves_are_read(n: int) -> None:
    told = explain(searched(TreePlan(n, 4), path=0))
    assert [step.chosen for step in told.steps] == [None]
    assert told.leaves == tuple(range(1, n + 1))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(searches())
def test_selected_nodes_partition_the_real_tokens(search: tuple[TreeCrossAttentionResult, int]) -> None:
    result, length = search
    told = explain(result)
    covered = sorted(token for selected in told.selected for token in range(*selected.tokens))
    assert covered == list(range(length)) == list(range(told.tokens))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(searches())
def test_selected_nodes_are_those_the_operator_attended_to(search: tuple[TreeCrossAttentionResult, int]) -> None:
    result, _ = search
    if result.plan.depth:  # without decisions the operator reads all leaves, tested above
        rows = [row for row in result.selected[0, 0].tolist() if row >= 0]
        assert [selected.node for selected in explain(result).selected] == [row + 1 for row in rows]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(searches())
def test_states_only_ever_settle(search: tuple[TreeCrossAttentionResult, int]) -> None:
    """A node leaves "open" once and for good, and none is open at the end."""
    told = explain(search[0])
    history = [told.states(step) for step in range(len(told.steps) + 1)]
    for before, after in pairwise(history):
        assert all(old in ("open", new) for old, new in zip(before, after, strict=True))
    assert "open" not in history[-1]
    assert {s.node for s in told.selected} == by_state(told, len(told.steps)).get("selected")


@pytest.mark.parametrize(("n", "branch"), [(1, 2), (8, 2), (8, 4), (13, 3), (64, 4)])
def test_every_node_has_one_parent_and_its_own_number(n: int, branch: int) -> None:
    plan = TreePlan(n, branch)
    children = [child for node in range(plan.nodes + 1) for child in children_of(plan, node)]
    assert sorted(children) == list(range(1, plan.nodes + 1)) == sorted(descendants(plan, 0))


def test_a_model_s_own_search_is_explained_per_row_and_query() -> None:
    torch.manual_seed(0)
    attention = TreeCrossAttention(dim=8, heads=2).train()
    result = attention(torch.randn(2, 3, 8), attention.build(torch.randn(2, 16, 8)))
    for row in range(2):
        for query in range(3):
            told = explain(result, row, query)
            assert told.steps[-1].node == int(result.path[row, query]) + 7  # level 3 is nodes 7..14
            assert told.log_prob == pytest.approx(result.log_prob[row, query].item())


@pytest.mark.parametrize(
    ("row", "query", "named"), [(1, 0, "row"), (-1, 0, "row"), (0, 1, "query"), (0, True, "query")]
)
def test_a_query_that_is_not_there_is_refused(row: int, query: int, named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}: expected an int"):
        explain(searched(TreePlan(8), path=0), row, query)


def test_reading_all_leaves_is_not_a_search() -> None:
    attention = TreeCrossAttention(dim=8, heads=2, retrieval="full")
    with pytest.raises(InputError, match="one that searched"):
        explain(attention(torch.randn(1, 1, 8), attention.build(torch.randn(1, 16, 8))))


@pytest.mark.parametrize("step", [-1, 8])
def test_steps_outside_the_search_are_refused(step: int) -> None:
    with pytest.raises(InputError, match=r"^step: expected"):
        PAPER.states(step)


def test_only_searches_can_be_explained() -> None:
    with pytest.raises(InputError, match=r"^result: expected a TreeCrossAttentionResult, got str"):
        explain("a search")  # type: ignore[arg-type]
