"""How close a search comes to attention over all tokens: error, tokens read and time for a list of budgets.

`TreeCrossAttention.fidelity` calls `measure` and returns a `Fidelity`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Protocol, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retreever.arguments import check_int, check_number, reject
from retreever.checks import check_tensor
from retreever.nn.blocks import AttentionBlock
from retreever.results import Retrieval, TreeCrossAttentionResult
from retreever.tree.plan import TreePlan
from retreever.tree.value import Tree

Call = Callable[[], Any]
ROUNDS = 7  # timed calls of every budget
SECONDS = 3.0  # no new round of timed calls is started after these
DEFAULT_BUDGETS = (16, 32, 64, 128, 256, 512, 1024)


class Searching(Protocol):
    """What is measured: a `TreeCrossAttention`."""

    block: AttentionBlock
    budget: int | None
    retrieval: Retrieval

    def build(self, context: Tensor, mask: Tensor | None = None) -> Tree:
        """The tree over a context."""

    def eval(self) -> Self:
        """The module in evaluation mode."""

    def __call__(self, query: Tensor, tree: Tree) -> TreeCrossAttentionResult: ...


@dataclass(frozen=True)
class Reading:
    """What one budget costs and how large its error is, over all queries.

    Attributes:
        budget: how many tokens a query may read; None is one path, the number of context tokens is all of them.
        tokens: tokens read per query, on average.
        share: `tokens` as a part of the real tokens of a context, on average.
        error: norm of the difference to the output over all tokens, divided by the norm of that output.
        error_95: the same for single queries: 95 of 100 have an error of at most this.
        ms: milliseconds per call with all queries, median.
    """

    budget: int | None
    tokens: float
    share: float
    error: float
    error_95: float
    ms: float


@dataclass(frozen=True)
class Fidelity:
    """How close every budget comes to attention over all tokens; `print` shows it as a table.

    Attributes:
        rows: one reading per budget, the smallest first; the last one reads all tokens and has error 0.
        error: the error wanted, which `budget` keeps.
        build_ms: milliseconds to build the tree, once per context, median.
    """

    rows: tuple[Reading, ...]
    error: float
    build_ms: float

    @property
    def budget(self) -> int | None:
        """The smallest budget whose error is at most `error`; None is one path, the number of tokens is all."""
        return self.rows[self._chosen].budget

    def to_json(self) -> dict[str, Any]:
        """All fields and the budget as plain data."""
        return {**asdict(self), "budget": self.budget}

    def __str__(self) -> str:
        head = ("budget", "tokens", "share", "error", "error 95%", "ms")
        grid = [head, *(_cells(row) for row in self.rows[:-1]), ("all", *_cells(self.rows[-1])[1:])]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in grid]
        chosen = grid[1 + self._chosen][0]
        return "\n".join([*lines, f"error at most {self.error:g}: {chosen}; tree built in {self.build_ms:.3g} ms"])

    @property
    def _chosen(self) -> int:
        """The row of `budget`; the last one where no error is a number."""
        rows = (index for index, row in enumerate(self.rows) if row.error <= self.error)
        return next(rows, len(self.rows) - 1)


@torch.no_grad()
def measure(
    module: Searching,
    queries: Float[Tensor, "b m d"],
    context: Float[Tensor, "b n c"],
    mask: Bool[Tensor, "b n"] | None,
    budgets: Sequence[int | None] | None,
    error: float,
) -> Fidelity:
    """Measure a `TreeCrossAttention`; its `fidelity` describes the arguments."""
    check_budgets(budgets)
    check_error(error)
    reader = deepcopy(module).eval()  # the caller's module keeps its mode and settings
    tree = reader.build(context, mask)
    _check_queries(queries, reader, tree)
    n = context.shape[1]
    limits = default_budgets(tree.plan) if budgets is None else budgets
    calls = {limit: partial(_read, reader, queries, tree, limit) for limit in (*_below(n, limits), n)}
    *times, build_ms = median_ms([*calls.values(), partial(reader.build, context, mask)], queries.device)
    results = [call() for call in calls.values()]
    real = float(n) if mask is None else float(mask.sum(dim=1).float().mean())
    rows = [_reading(*row, results[-1].output, real) for row in zip(calls, results, times, strict=True)]
    return Fidelity(tuple(rows), float(error), build_ms)


def check_error(error: object) -> None:
    """`error` must be a finite number above 0."""
    if isinstance(error, int | float) and error <= 0:
        reject("error", "a number > 0", error)
    check_number("error", error)


def check_budgets(budgets: object) -> None:
    """`budgets` must be ascending ints >= 1, with None, one path, before all others; None takes the defaults."""
    if budgets is None:
        return
    expected = "ascending ints >= 1, or None for one path before them"
    if not isinstance(budgets, Sequence) or isinstance(budgets, str) or not budgets:
        reject("budgets", expected, repr(budgets))
    numbers = list(budgets[1:] if budgets[0] is None else budgets)
    for index, number in enumerate(numbers, start=len(budgets) - len(numbers)):
        check_int(f"budgets[{index}]", number, 1)
    if numbers != sorted(set(numbers)):
        reject("budgets", expected, repr(budgets))


def default_budgets(plan: TreePlan) -> tuple[int | None, ...]:
    """One path, and powers of two from twice its tokens to half of all tokens, 1,024 at most."""
    return (None, *(budget for budget in DEFAULT_BUDGETS if 2 * plan.tokens <= budget <= plan.n // 2))


def median_ms(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Milliseconds of every call: medians of rounds in which all are timed in turn, after one that warms up."""
    samples: list[list[float]] = [[] for _ in calls]
    for call in calls:
        _seconds(call, device)
    started = perf_counter()
    for _ in range(ROUNDS):
        for call, taken in zip(calls, samples, strict=True):
            taken.append(1e3 * _seconds(call, device))
        if perf_counter() - started > SECONDS:
            break
    return [median(taken) for taken in samples]


def _seconds(call: Call, device: torch.device) -> float:
    _wait_for(device)
    started = perf_counter()
    call()
    _wait_for(device)
    return perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check_queries(queries: Tensor, reader: Searching, tree: Tree) -> None:
    check_tensor("queries", queries, "b m d", b=tree.keys.shape[0], d=reader.block.dim)
    if not queries.numel():
        reject("queries", "at least one query", tuple(queries.shape))


def _below(n: int, budgets: Sequence[int | None]) -> list[int | None]:
    """The budgets that do not allow to read all `n` tokens."""
    return [budget for budget in budgets if budget is None or budget < n]


def _read(reader: Searching, queries: Tensor, tree: Tree, budget: int | None) -> TreeCrossAttentionResult:
    """Answer from `tree` under `budget`; one of all tokens reads all leaves without a search."""
    reader.budget = budget
    reader.retrieval = "policy" if budget is None or budget < tree.plan.n else "full"
    return reader(queries, tree)


def _reading(
    budget: int | None, found: TreeCrossAttentionResult, ms: float, exact: Float[Tensor, "b m d"], real: float
) -> Reading:
    """The row of one budget; `real` is the number of tokens of a context, on average."""
    tokens = real if found.retrieval == "full" else float(found.tokens_read.float().mean())
    difference = (found.output.float() - exact.float()).norm(dim=-1).flatten()
    size = exact.float().norm(dim=-1).flatten().clamp_min(torch.finfo(torch.float32).tiny)
    errors = (difference / size).sort().values
    error_95 = errors[ceil(0.95 * errors.numel()) - 1]
    return Reading(budget, tokens, tokens / real, float(difference.norm() / size.norm()), float(error_95), ms)


def _cells(row: Reading) -> tuple[str, ...]:
    name = "one path" if row.budget is None else f"{row.budget:,}"
    tokens = f"{row.tokens:,.1f}".removesuffix(".0")
    return name, tokens, f"{100 * row.share:.2f}%", f"{row.error:.4f}", f"{row.error_95:.4f}", f"{row.ms:.3f}"
