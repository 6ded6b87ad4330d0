"""Explanation of the search of one query, step by step: as text, as plain data, and as node states to draw.

Follows the paper's appendix "Example Retrieval". Nodes are numbered as in its pictures: the root, which is never
stored, is node 0, and row r of the flat node tensor is node r + 1. Tokens have the caller's numbers: token k is
number k of the context as it was given, wherever it lies in the tree. Ranges are half-open pairs (start, stop).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from retreever.arguments import check_int, reject
from retreever.results import TreeCrossAttentionResult
from retreever.tree.nodes import Range, children_of, descendants, level_of, parent_of, slots_of
from retreever.tree.plan import TreePlan
from retreever.tree.selected import selected_nodes

State = Literal["explored", "selected", "open", "unexplored"]
MOST_RUNS = 8  # of token numbers that the text of a node lists


@dataclass(frozen=True)
class Step:
    """One node explored: its real children, the ones taken and the ones rejected.

    Children taken are explored in turn, children rejected are read as summaries. One path takes one child; with a
    budget a step takes any number of them. Leaves are neither taken nor rejected: all of them are read.
    """

    node: int
    children: tuple[int, ...]
    taken: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def chosen(self) -> int | None:
        """The child taken, None where leaves are read; with a budget also where none or several are taken."""
        return self.taken[0] if len(self.taken) == 1 else None

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves read in this step."""
        return () if self.taken or self.rejected else self.children

    def __str__(self) -> str:
        if self.leaves:
            leaves = "leaf" if len(self.leaves) == 1 else "leaves"
            return f"explored {self.node}, read {leaves} {_joined(self.leaves)}"
        if len(self.children) == len(self.taken) == 1:
            return f"explored {self.node}, took its only child {self.chosen}"
        parts = (("took", self.taken), ("rejected", self.rejected))
        return ", ".join([f"explored {self.node}", *(f"{word} {_joined(nodes)}" for word, nodes in parts if nodes)])


@dataclass(frozen=True)
class Selected:
    """A node attended to, with the leaf slots it covers and its tokens.

    `tokens` counts them in leaf order without padding. `numbers` are the caller's numbers of the same tokens: others
    than those of the range where a module put the tokens into an order of its own.
    """

    node: int
    slots: Range
    tokens: Range
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.node} ({'token' if len(self.numbers) == 1 else 'tokens'} {_runs(self.numbers)})"


@dataclass(frozen=True)
class Explanation:
    """The search of query `query` of row `row` of the batch."""

    row: int
    query: int
    plan: TreePlan
    real: tuple[bool, ...]  # for every node, the root first, whether it covers a token; False is padding
    log_prob: float  # of the whole path under the policy
    steps: tuple[Step, ...]  # one per node explored, the root first
    selected: tuple[Selected, ...]  # the nodes attended to: rejected ones from the top, then the leaves
    numbers: tuple[int, ...]  # the caller's number of every token, in leaf order
    budgeted: bool  # whether the search had a budget, so that a step may take any number of children

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaves at the end of the path, or of all paths that a budget opened: all of them read."""
        return tuple(leaf for step in self.steps for leaf in step.leaves)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of every level that was explored: on one path, every step."""
        levels = [level_of(self.plan, step.node) for step in self.steps]
        return tuple(levels.index(level) for level in range(levels[-1] + 1))

    @property
    def tokens(self) -> int:
        """Tokens in the context of this row."""
        return len(self.numbers)

    def states(self, step: int) -> tuple[State, ...]:
        """State of every node when step `step` begins; `len(steps)` is the end of the search.

        "explored" nodes were or are being explored, "selected" ones are attended to, "open" ones may still be explored
        and "unexplored" ones never will be (padding never is).
        """
        if not 0 <= step <= len(self.steps):
            reject("step", f"an int from 0 to {len(self.steps)}", step)
        states: list[State] = ["open" if real else "unexplored" for real in self.real]
        for done in self.steps[:step]:
            states[done.node] = "explored"
            for node in (*done.rejected, *done.leaves):
                states[node] = "selected"
                for below in descendants(self.plan, node):
                    states[below] = "unexplored"
        if step < len(self.steps):
            states[self.steps[step].node] = "explored"
        return tuple(states)

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain lists and numbers; `states` has one list per step and one for the end.

        With a budget, steps have a list "taken" in place of "chosen", and `states` one list per level in place of step.
        """
        return {
            "row": self.row,
            "query": self.query,
            "branch": self.plan.branch,
            "depth": self.plan.depth,
            "leaf_slots": self.plan.leaves,
            "tokens": self.tokens,
            "tokens_read": len(self.selected),
            "log_prob": self.log_prob,
            "padding": [node for node, real in enumerate(self.real) if not real],
            "steps": [self._step_json(step) for step in self.steps],
            "leaves": list(self.leaves),
            "selected": [{name: _plain(value) for name, value in vars(node).items()} for node in self.selected],
            "states": [list(self.states(step)) for step in (*self.starts, len(self.steps))],
        }

    def _step_json(self, step: Step) -> dict[str, Any]:
        taken: dict[str, Any] = {"taken": list(step.taken)} if self.budgeted else {"chosen": step.chosen}
        return {"node": step.node, "children": list(step.children), **taken, "rejected": list(step.rejected)}

    def __str__(self) -> str:
        read, tokens = len(self.selected), self.tokens
        return "\n".join(
            [
                f"row {self.row}, query {self.query}: read {read} nodes for {tokens} tokens "
                f"({100 * read / tokens:.1f}%), path probability {math.exp(self.log_prob):.3g}",
                *(f"step {number}: {step}" for number, step in enumerate(self.steps)),
                "selected: " + ", ".join(map(str, self.selected)),
            ]
        )


def explain(result: TreeCrossAttentionResult, row: int = 0, query: int = 0) -> Explanation:
    """The explanation of the search of query `query` of batch row `row`."""
    if not isinstance(result, TreeCrossAttentionResult):
        reject("result", "a TreeCrossAttentionResult", type(result).__name__)
    b, m = result.path.shape
    for name, value, size in (("row", row, b), ("query", query, m)):
        check_int(name, value, 0)
        if value >= size:
            reject(name, f"an int below {size}", value)
    plan = result.plan
    if result.retrieval != "policy":
        reject("result", 'one that searched (retrieval="policy")', "one that read all leaves")
    if result.beside is not None:
        reject("result", "the search of one tree (fold the tree beside it into it)", "that of two")
    mask = None if result.node_mask is None else result.node_mask[row : row + 1]
    real = (True, *([True] * plan.nodes if mask is None else mask[0].tolist()))
    path = result.path[row : row + 1, query : query + 1]
    rows = selected_nodes(plan, path, mask)[0, 0] if result.rows is None else result.rows[row, query]
    steps = _steps(plan, real, [node + 1 for node in rows.tolist() if node >= 0])
    tokens = sum(real[plan.leaf_offset + 1 :])
    numbers = tuple(range(tokens) if result.order is None else result.order[row, :tokens].tolist())
    selected = _selected(plan, real, steps, numbers)
    log_prob = result.log_prob[row, query].item()
    return Explanation(row, query, plan, real, log_prob, steps, selected, numbers, result.rows is not None)


def _steps(plan: TreePlan, real: tuple[bool, ...], read: list[int]) -> tuple[Step, ...]:
    """One step for every node above those read, level by level."""
    above: set[int] = {0}
    for node in read:
        while (node := parent_of(plan, node)) not in above:
            above.add(node)
    steps = []
    for node in sorted(above):
        children = tuple(child for child in children_of(plan, node) if real[child])
        taken = tuple(child for child in children if child in above)
        leaves = level_of(plan, node) == plan.depth
        steps.append(Step(node, children, taken, () if leaves else tuple(c for c in children if c not in above)))
    return tuple(steps)


def _selected(
    plan: TreePlan, real: tuple[bool, ...], steps: tuple[Step, ...], numbers: tuple[int, ...]
) -> tuple[Selected, ...]:
    nodes = [node for step in steps for node in step.rejected] + [leaf for step in steps for leaf in step.leaves]
    rank = [0, *accumulate(map(int, real[plan.leaf_offset + 1 :]))]  # real tokens before every slot
    selected = []
    for node in nodes:
        slots = slots_of(plan, node)
        tokens = rank[slots[0]], rank[slots[1]]
        selected.append(Selected(node, slots, tokens, numbers[slice(*tokens)]))
    return tuple(selected)


def _joined(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes))


def _runs(numbers: tuple[int, ...]) -> str:
    """Numbers in ascending order, neighbours as "first-last"; of many runs the first ones and the number of all."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs[:MOST_RUNS])
    return text if len(runs) <= MOST_RUNS else f"{text}, ..., {len(numbers)} in all"


def _plain(value: int | tuple[int, ...]) -> int | list[int]:
    return list(value) if isinstance(value, tuple) else value
