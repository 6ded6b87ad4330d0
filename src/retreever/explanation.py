"""Explanation of the search of one query, step by step: as text, as plain data, and as node states to draw.

Follows the paper's appendix "Example Retrieval". Nodes are numbered as in its pictures: the root, which is never
stored, is node 0, and row r of the flat node tensor is node r + 1. Ranges are half-open pairs (start, stop).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from retreever.arguments import check_int, reject
from retreever.results import TreeCrossAttentionResult
from retreever.tree.plan import TreePlan
from retreever.tree.selected import path_nodes

State = Literal["explored", "selected", "open", "unexplored"]
Range = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One node explored: its real children, the one taken and the ones rejected.

    The last step takes no child (`chosen` is None): all leaves of the block are read.
    """

    node: int
    children: tuple[int, ...]
    chosen: int | None
    rejected: tuple[int, ...]

    def __str__(self) -> str:
        if self.chosen is None:
            leaves = "leaf" if len(self.children) == 1 else "leaves"
            return f"explored {self.node}, read {leaves} {_joined(self.children)}"
        if not self.rejected:
            return f"explored {self.node}, took its only child {self.chosen}"
        return f"explored {self.node}, took {self.chosen}, rejected {_joined(self.rejected)}"


@dataclass(frozen=True)
class Selected:
    """A node attended to, with the leaf slots it covers and its tokens, counted in leaf order without padding."""

    node: int
    slots: Range
    tokens: Range

    def __str__(self) -> str:
        first, last = self.tokens[0], self.tokens[1] - 1
        return f"{self.node} (token {first})" if first == last else f"{self.node} (tokens {first}-{last})"


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

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaves at the end of the path, all of them read."""
        return self.steps[-1].children

    @property
    def tokens(self) -> int:
        """Tokens in the context of this row."""
        return sum(self.real[self.plan.leaf_offset + 1 :])

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
            for node in done.rejected:
                states[node] = "selected"
                for below in descendants(self.plan, node):
                    states[below] = "unexplored"
        if step < len(self.steps):
            states[self.steps[step].node] = "explored"
        else:
            for leaf in self.leaves:
                states[leaf] = "selected"
        return tuple(states)

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain lists and numbers; `states` has one list per step and one for the end."""
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
            "steps": [
                {"node": s.node, "children": list(s.children), "chosen": s.chosen, "rejected": list(s.rejected)}
                for s in self.steps
            ],
            "leaves": list(self.leaves),
            "selected": [{"node": s.node, "slots": list(s.slots), "tokens": list(s.tokens)} for s in self.selected],
            "states": [list(self.states(step)) for step in range(len(self.steps) + 1)],
        }

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
    path = result.path[row : row + 1, query : query + 1]
    mask = None if result.node_mask is None else result.node_mask[row : row + 1]
    real = (True, *([True] * plan.nodes if mask is None else mask[0].tolist()))
    taken = [node + 1 for node in path_nodes(plan, path)[0, 0].tolist()]
    steps = _steps(plan, real, taken)
    log_prob = result.log_prob[row, query].item()
    return Explanation(row, query, plan, real, log_prob, steps, _selected(plan, real, steps))


def level_of(plan: TreePlan, node: int) -> int:
    """Level of a node: 0 for the root, `plan.depth + 1` for leaves."""
    return next(level for level in range(plan.depth + 1, -1, -1) if node > plan.offsets[level])


def children_of(plan: TreePlan, node: int) -> range:
    """Children of a node, padding included; none for a leaf."""
    level = level_of(plan, node)
    if level > plan.depth:
        return range(0)
    width = plan.branch if level < plan.depth else plan.block
    first = plan.offsets[level + 1] + 1 + (node - 1 - plan.offsets[level]) * width
    return range(first, first + width)


def slots_of(plan: TreePlan, node: int) -> Range:
    """Leaf slots under a node; a leaf's own slot."""
    level = level_of(plan, node)
    width = plan.block * plan.branch ** (plan.depth - level) if level <= plan.depth else 1
    index = node - 1 - plan.offsets[level]
    return index * width, (index + 1) * width


def descendants(plan: TreePlan, node: int) -> list[int]:
    """All nodes below a node."""
    return [below for child in children_of(plan, node) for below in (child, *descendants(plan, child))]


def _steps(plan: TreePlan, real: tuple[bool, ...], taken: list[int]) -> tuple[Step, ...]:
    steps = []
    for node, chosen in zip([0, *taken], [*taken, None], strict=True):
        children = tuple(child for child in children_of(plan, node) if real[child])
        rejected = () if chosen is None else tuple(child for child in children if child != chosen)
        steps.append(Step(node, children, chosen, rejected))
    return tuple(steps)


def _selected(plan: TreePlan, real: tuple[bool, ...], steps: tuple[Step, ...]) -> tuple[Selected, ...]:
    nodes = [node for step in steps for node in step.rejected] + list(steps[-1].children)
    rank = [0, *accumulate(map(int, real[plan.leaf_offset + 1 :]))]  # real tokens before every slot
    covers = [(node, slots_of(plan, node)) for node in nodes]
    return tuple(Selected(node, slots, (rank[slots[0]], rank[slots[1]])) for node, slots in covers)


def _joined(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes))
