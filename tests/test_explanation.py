"""A search told step by step is the search that took place: the paper's example, and properties of any tree."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retreever.attention import TreeCrossAttention
from retreever.errors import InputError
from retreever.explanation import MOST_RUNS, Explanation, Selected, explain
from retreever.models.retreever import ReTreever
from retreever.results import TreeCrossAttentionResult
from retreever.tree.build import plan_for
from retreever.tree.nodes import children_of, descendants, parent_of, slots_of
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


@st.composite
def budgets(draw: st.DrawFn) -> tuple[TreeCrossAttentionResult, int]:
    """The search of a random attention with a budget, in a row of as many real tokens."""
    branch, n = draw(st.integers(2, 4)), draw(st.integers(1, 40))
    length, budget = draw(st.integers(1, n)), draw(st.integers(1, 45))
    torch.manual_seed(draw(st.integers(0, 99)))
    attention = TreeCrossAttention(dim=4, heads=1, branch=branch, aggregator="mean", impl="reference").eval()
    mask = None if length == n else (torch.arange(n) < length)[None]
    return attention(4 * torch.randn(1, 1, 4), attention.build(torch.randn(1, n, 4), mask), budget=budget), length


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
    assert told["steps"][0] == {"node": 0, "children": [1, 2], "chosen": 1, "rejected": [2]}
    assert told["selected"][0] == {"node": 2, "slots": [4, 8], "tokens": [4, 8], "numbers": [4, 5, 6, 7]}
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
    assert all(parent_of(plan, child) == node for node in range(plan.nodes + 1) for child in children_of(plan, node))


def test_a_model_s_own_search_is_explained_per_row_and_query() -> None:
    torch.manual_seed(0)
    attention = TreeCrossAttention(dim=8, heads=2).train()
    result = attention(torch.randn(2, 3, 8), attention.build(torch.randn(2, 16, 8)))
    for row in range(2):
        for query in range(3):
            told = explain(result, row, query)
            assert told.steps[-1].node == int(result.path[row, query]) + 7  # level 3 is nodes 7..14
            assert told.log_prob == pytest.approx(result.log_prob[row, query].item())


BUDGET = replace(searched(TreePlan(16), path=1), rows=torch.tensor([[[4, 5, 6, 8, 9, 16, 17, -1]]]))
"""Eight tokens at most: nodes 1 and 2 are taken, then 3 and 4, then 8; all children of 2 and of 4 are summaries."""


def test_a_search_with_a_budget_reads_as_lines() -> None:
    assert str(explain(BUDGET)).splitlines() == [
        "row 0, query 0: read 7 nodes for 16 tokens (43.8%), path probability 1",
        "step 0: explored 0, took 1, 2",
        "step 1: explored 1, took 3, 4",
        "step 2: explored 2, rejected 5, 6",
        "step 3: explored 3, took 8, rejected 7",
        "step 4: explored 4, rejected 9, 10",
        "step 5: explored 8, read leaves 17, 18",
        "selected: 5 (tokens 8-11), 6 (tokens 12-15), 7 (tokens 0-1), 9 (tokens 4-5), 10 (tokens 6-7), 17 (token 2), "
        "18 (token 3)",
    ]


def test_a_search_with_a_budget_as_plain_data() -> None:
    """Steps have all children they took, and there are states for the start of every level and the end."""
    told = explain(BUDGET).to_json()
    assert json.loads(json.dumps(told)) == told
    assert told["steps"][0] == {"node": 0, "children": [1, 2], "taken": [1, 2], "rejected": []}
    assert len(told["states"]) == 5 and all(len(states) == 31 for states in told["states"])


def test_states_of_a_search_with_a_budget() -> None:
    """When node 2 is explored, its sibling 1 has been, and the nodes taken below it are still open."""
    states = by_state(explain(BUDGET), 2)
    assert states == {"explored": {0, 1, 2}, "open": set(range(3, 31))}
    later = by_state(explain(BUDGET), 3)
    assert (later["selected"], later["explored"]) == ({5, 6}, {0, 1, 2, 3})
    assert later["unexplored"] == {11, 12, 13, 14, *range(23, 31)}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(budgets())
def test_with_a_budget_the_nodes_told_are_those_read_and_scored(search: tuple[TreeCrossAttentionResult, int]) -> None:
    result, length = search
    told = explain(result)
    assert [read.node - 1 for read in told.selected] == [row for row in result.selected[0, 0].tolist() if row >= 0]
    assert sorted(number for read in told.selected for number in read.numbers) == list(range(length))
    inner = [len(step.children) for step in told.steps if not step.leaves]
    scored = sum(count for count in inner if count > 1)
    assert int(result.nodes_scored[0, 0]) == (scored if any(step.rejected for step in told.steps) else 0)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(budgets())
def test_with_a_budget_every_node_taken_is_explored_once_and_in_turn(
    search: tuple[TreeCrossAttentionResult, int],
) -> None:
    told = explain(search[0])
    assert [step.node for step in told.steps] == [0, *sorted(node for step in told.steps for node in step.taken)]
    for step in told.steps:
        assert {*step.taken, *step.rejected, *step.leaves} == set(step.children)
    history = [told.states(step) for step in range(len(told.steps) + 1)]
    for before, after in pairwise(history):
        assert all(old in ("open", new) for old, new in zip(before, after, strict=True))
    assert "open" not in history[-1]
    assert {read.node for read in told.selected} == by_state(told, len(told.steps)).get("selected")


def test_a_budget_for_one_path_is_told_like_the_path() -> None:
    torch.manual_seed(0)
    attention = TreeCrossAttention(dim=8, heads=2).eval()
    query, tree = torch.randn(1, 1, 8), attention.build(torch.randn(1, 16, 8))
    assert str(explain(attention(query, tree, budget=1))) == str(explain(attention(query, tree)))


@pytest.mark.parametrize("budget", [13, 100])
def test_a_budget_for_all_tokens_explores_every_node_and_reads_every_leaf(budget: int) -> None:
    attention = TreeCrossAttention(dim=8, heads=2).eval()
    told = explain(attention(torch.randn(1, 1, 8), attention.build(torch.randn(1, 13, 8)), budget=budget))
    assert [step.node for step in told.steps] == list(range(15))
    assert len(told.leaves) == len(told.selected) == 13 and not any(step.rejected for step in told.steps)


@pytest.mark.parametrize("budget", [None, 9, 40])
def test_tokens_have_the_numbers_of_the_caller(budget: int | None) -> None:
    """A point's value changes the keys of the nodes above it and of no others, whatever the order, padding and all."""
    torch.manual_seed(0)
    model = ReTreever(dim=8, heads=2, hidden=8, encoder="identity", impl="reference").eval()
    xc, yc, xt = torch.randn(1, 20, 1), torch.randn(1, 20, 1), torch.randn(1, 1, 1)
    mask = torch.arange(20)[None] % 4 != 1  # 15 real points
    told = explain(model.search(model.encode(xc, yc, mask), xt, budget=budget))
    before = model.encode(xc, yc, mask).keys
    for number in mask[0].nonzero().flatten().tolist():
        moved = yc.clone()
        moved[0, number] += 1
        changed = (model.encode(xc, moved, mask).keys != before).flatten(2).any(dim=2)[0]
        assert [number in read.numbers for read in told.selected] == [bool(changed[r.node - 1]) for r in told.selected]
    assert sorted(told.numbers) == mask[0].nonzero().flatten().tolist()
    assert told.to_json()["selected"][0]["numbers"] == list(told.selected[0].numbers)


def test_an_attention_that_orders_its_tokens_tells_their_numbers() -> None:
    torch.manual_seed(0)
    attention = TreeCrossAttention(dim=8, heads=2, order="keys").eval()
    context = torch.randn(2, 16, 8)
    result = attention(torch.randn(2, 1, 8), attention.build(context))
    for row in range(2):
        told = explain(result, row)
        assert result.order is not None and list(told.numbers) == result.order[row].tolist() != list(range(16))
        (leaf,) = (read for read in told.selected if read.node == told.leaves[0])
        alone = attention.block.key_values(context[row, leaf.numbers[0]][None, None])[0]
        torch.testing.assert_close(attention.build(context).keys[row, leaf.node - 1], alone[0, 0])


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((7,), "3 (token 7)"),
        ((4, 5, 6), "3 (tokens 4-6)"),
        ((9, 2, 1, 5), "3 (tokens 1-2, 5, 9)"),
        (tuple(range(0, 2 * MOST_RUNS, 2)), "3 (tokens 0, 2, 4, 6, 8, 10, 12, 14)"),
        (tuple(range(0, 100, 2)), "3 (tokens 0, 2, 4, 6, 8, 10, 12, 14, ..., 50 in all)"),
    ],
)
def test_token_numbers_are_short_to_read(numbers: tuple[int, ...], text: str) -> None:
    assert str(Selected(3, (0, len(numbers)), (0, len(numbers)), numbers)) == text


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
