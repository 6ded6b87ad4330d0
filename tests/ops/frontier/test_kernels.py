"""Every backend of a budgeted search against a search by hand on lists, and its outputs against float64.

As for the plain search, Triton runs in its interpreter on the CPU, and otherwise on a CUDA device, marked `gpu`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import TreePlan, tree_attention
from retreever.ops.frontier.api import read_rows
from retreever.ops.search.api import TreeAttention
from retreever.ops.search.inputs import SearchInputs
from retreever.tree.budget import level_widths, spread
from retreever.tree.means import log_counts
from retreever.tree.order import leaf_layout
from retreever.tree.plan import tree_depth

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
TIE = 1e-4  # logs of shares closer than this may be ranked either way
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter computes with numpy
TRITON = importlib.util.find_spec("triton") is not None
NUMBA = importlib.util.find_spec("numba") is not None
no_device = [] if INTERPRETING else [pytest.mark.gpu]
numba = pytest.param("numba", marks=pytest.mark.skipif(not NUMBA, reason="numba is not installed"))
triton = pytest.param("triton", marks=[pytest.mark.skipif(not TRITON, reason="triton is not installed"), *no_device])
each_backend = pytest.mark.parametrize("impl", ["reference", numba, triton])


# ------------------------------------------------------------------------------------------------ cases and inputs


@dataclass(frozen=True)
class Case:
    """One problem. `mask`: none, ragged lengths, or a single real token in every row."""

    n: int
    budget: int
    k: int = 2
    b: int = 2
    m: int = 3
    h: int = 4
    e: int = 16
    mask: str = ""
    noise: bool = False
    counts: bool = False
    dtype: torch.dtype = torch.float32
    views: bool = False
    sharp: float = 1.0  # factor of the queries

    @property
    def plan(self) -> TreePlan:
        return TreePlan(self.n, self.k, block=min(self.n, self.k) if self.mask else 0)

    @property
    def lengths(self) -> list[int]:
        if self.mask == "one":
            return [1] * self.b
        return torch.linspace(self.n, 1, self.b).long().tolist() if self.mask else [self.n] * self.b


class Inputs(NamedTuple):
    """Queries, nodes, and what else a search takes."""

    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    noise: Tensor | None
    counts: Tensor | None


def node_mask(plan: TreePlan, lengths: list[int]) -> Tensor:
    levels = [leaf_layout(plan, torch.tensor(lengths)).real]
    for level in range(plan.depth, 0, -1):
        levels.insert(0, levels[0].unflatten(1, (plan.branch**level, -1)).any(dim=2))
    return torch.cat(levels, dim=1)


def make(case: Case, seed: int = 0, padding: float = torch.nan) -> Inputs:
    """Random inputs; nobody may read what nodes of padding hold."""
    generator = torch.Generator().manual_seed(seed)
    plan = case.plan
    q = torch.randn(case.b, case.m, case.h, case.e, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, case.b, plan.nodes, case.h, case.e, generator=generator, dtype=torch.float64)
    mask = node_mask(plan, case.lengths) if case.mask or not plan.full else None
    if mask is not None:
        keys[~mask] = values[~mask] = padding
    noise = torch.rand(case.b, case.m, plan.depth, generator=generator) if case.noise else None
    counts = log_counts(plan, mask, keys.float()) if case.counts else None
    return Inputs((case.sharp * q).to(case.dtype), keys.to(case.dtype), values.to(case.dtype), mask, noise, counts)


def small(case: Case, impl: Any) -> Case:
    """Fewer queries where they are slow."""
    return replace(case, m=min(case.m, 1)) if impl == "triton" and INTERPRETING else case


def search(case: Case, given_: Inputs, impl: Any, budget: int | None = None, lse: bool = True) -> TreeAttention:
    """The search on the device of the backend; its results on the CPU."""
    device = "cuda" if impl == "triton" and not INTERPRETING else "cpu"
    q, keys, values, mask, noise, counts = (None if x is None else x.to(device) for x in given_)
    if case.views:  # halves of one tensor, and axes that are not dense
        keys, values = torch.stack([keys, values], dim=2).unbind(2)
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
        mask = None if mask is None else mask.t().contiguous().t()
    found = tree_attention(
        q, keys, values, case.plan, mask, noise, impl=impl, budget=budget or case.budget, log_count=counts, lse=lse
    )
    return TreeAttention(*(None if x is None else x.cpu() for x in found))


# ------------------------------------------------------------------------------------------------ by hand


class Hand:
    """The search of one query, node by node on Python lists, in float64."""

    def __init__(self, case: Case, given_: Inputs, row: int, query: int) -> None:
        self.plan, self.row, self.length = case.plan, row, case.lengths[row]
        self.q, self.keys = given_.q[row, query].double(), given_.keys[row].double()
        self.mask = None if given_.mask is None else given_.mask[row]
        self.counts = None if given_.counts is None else given_.counts[row].double()

    def real(self, rows: range) -> list[int]:
        return [row for row in rows if self.mask is None or bool(self.mask[row])]

    def score(self, row: int) -> Tensor:
        score = (self.q * self.keys[row]).sum(dim=1) / self.q.shape[1] ** 0.5
        return score if self.counts is None else score + self.counts[row]

    def read(self, block: int, budget: int) -> tuple[list[int], float]:
        """Rows read beside the path to `block`, and how clear the closest decision was."""
        plan = self.plan
        if self.length <= budget:
            return self.real(range(plan.leaf_offset, plan.nodes)), torch.inf
        own = tree_depth(self.length, plan.branch)
        widths = (1,) * (plan.depth - own) + level_widths(plan.branch, own, budget)
        opened, left, gap = [-1], [], torch.inf
        for level, width in enumerate(widths, start=1):
            share = self.shares(level, opened)
            share[plan.offsets[level] + block // plan.branch ** (plan.depth - level)] = torch.inf
            ranked = sorted(share, key=lambda row: -share[row])
            if len(ranked) > width:
                gap = min(gap, share[ranked[width - 1]] - share[ranked[width]])
            opened, left = ranked[:width], left + ranked[width:]
        last = plan.leaf_offset - plan.blocks if plan.depth else -1
        for row in opened:
            first = plan.leaf_offset + (row - last) * plan.block
            left += self.real(range(first, first + plan.block))
        return sorted(left), gap

    def shares(self, level: int, opened: list[int]) -> dict[int, float]:
        """Log of the share of the attention that each child of the opened nodes has: fourth roots, mean over heads."""
        plan = self.plan
        above = plan.offsets[level - 1] if level > 1 else -1
        firsts = [plan.offsets[level] + (row - above) * plan.branch for row in opened]
        children = [child for first in firsts for child in self.real(range(first, first + plan.branch))]
        weights = torch.stack([self.score(child) for child in children]).softmax(dim=0).pow(0.25).mean(dim=1)
        return dict(zip(children, weights.log().tolist(), strict=True))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach()).abs().max()) if want.numel() else 0.0


def close(got: Tensor, same: Tensor, want: Tensor, factor: float = 2) -> bool:
    """Error of `got` within `factor` times that of the reference in the same dtype, or within its rounding."""
    bound = factor * error(same, want) + 8 * torch.finfo(got.dtype).eps * max(1.0, float(want.abs().max()))
    return error(got, want) <= bound


def check_rows(case: Case, given_: Inputs, found: TreeAttention) -> None:
    """The rows of every clear-cut query are those found by hand, in order, and -1 behind them."""
    assert found.rows is not None and found.rows.dtype == torch.int64
    clear = 0
    for row, query in [(r, m) for r in range(case.b) for m in range(case.m)]:
        rows, gap = Hand(case, given_, row, query).read(int(found.path[row, query]), case.budget)
        got = found.rows[row, query].tolist()
        if case.budget >= case.n:  # all leaf slots, padding among them
            got = sorted(got, key=lambda node: (node < 0, node))
        assert gap <= TIE or got == rows + [-1] * (len(got) - len(rows))
        clear += gap > TIE
    assert clear >= 0.8 * case.b * case.m


def check(case: Case, impl: Any, seed: int = 0) -> None:
    """The rows, and attention to them."""
    case = small(case, impl)
    given_ = make(case, seed)
    found = search(case, given_, impl)
    check_rows(case, given_, found)
    inner = torch.promote_types(case.dtype, torch.float32)
    tensors = SearchInputs(*given_[:3], case.plan, given_.mask, log_count=given_.counts)
    exact = tensors._replace(q=given_.q.double(), keys=given_.keys.double(), values=given_.values.double())
    same, want = read_rows(tensors, found.rows), read_rows(exact, found.rows)
    assert found.output.dtype == case.dtype and found.lse.dtype == inner
    assert close(found.output, same.output, want.output)
    assert close(found.lse, same.lse.to(inner), want.lse)


# ------------------------------------------------------------------------------------------------ comparisons

CASES = [
    Case(1, 1, h=1, e=8, m=1),
    Case(3, 2, k=5, h=3, e=8),  # no decision, and more tokens than the budget
    Case(5, 3, k=3, e=60, noise=True),
    Case(16, 9, h=2, e=32),
    Case(17, 11, k=4, h=5, e=8, mask="ragged", counts=True),
    Case(20, 12, k=5, h=3, e=3, b=3, mask="ragged", noise=True),
    Case(9, 5, mask="one"),
    Case(27, 14, k=3, h=1, e=128, b=1, counts=True),
    Case(40, 25, h=9, e=4, b=3, m=2, mask="ragged", views=True),
    Case(33, 12, h=2, e=8, counts=True, views=True, noise=True),
    Case(64, 40, h=2, e=8, b=1),
    Case(100, 60, k=16, h=2, e=4, b=1, m=2, mask="ragged"),
    Case(12, 20, k=3, mask="ragged"),  # everything
]
HALF = [
    Case(33, 13, h=3, e=8, dtype=torch.bfloat16, counts=True),
    Case(40, 17, k=3, h=2, e=16, mask="ragged", noise=True, dtype=torch.float16),
]
WIDE = [
    Case(300, 260, k=64, h=2, e=4, m=2),  # more children on a level than are ranked one against another
    Case(200, 130, k=3, h=1, e=4, b=2, m=1, mask="ragged", counts=True),
]


def name(case: Case) -> str:
    parts = [f"n{case.n}", f"t{case.budget}", f"k{case.k}", f"b{case.b}", f"m{case.m}", f"h{case.h}", f"e{case.e}"]
    parts += [case.mask, "noise" * case.noise, "counts" * case.counts, "views" * case.views, str(case.dtype)[6:]]
    return "-".join(part for part in parts if part)


@each_backend
@pytest.mark.parametrize("case", CASES + WIDE, ids=name)
def test_what_is_read_is_what_a_search_by_hand_reads(case: Case, impl: Any) -> None:
    check(case, impl)


@each_backend
@pytest.mark.parametrize(("n", "k", "budget"), [(60, 16, 46), (300, 32, 260)])
def test_nodes_with_hardly_any_share_are_ranked_too(n: int, k: int, budget: int, impl: Any) -> None:
    """Where one node has nearly all the attention, the budget goes to the next."""
    case = Case(n, budget, k=k, h=1, e=4, b=3, m=1, sharp=30.0)
    given_ = make(case)
    check_rows(case, given_, search(case, given_, impl))


@pytest.mark.parametrize("impl", ["reference", triton])
@pytest.mark.parametrize("case", HALF, ids=name)
def test_half_precision_reads_the_same(case: Case, impl: Any) -> None:
    check(case, impl)


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        n=st.integers(1, 60),
        budget=st.integers(1, 64),
        k=st.integers(2, 7),
        b=st.integers(1, 3),
        m=st.integers(1, 2),
        h=st.integers(1, 9),
        e=st.sampled_from([1, 3, 8, 17]),
        mask=st.sampled_from(["", "ragged", "one"]),
        noise=st.booleans(),
        counts=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        views=st.booleans(),
    ),
    st.integers(0, 5),
)
def test_any_small_problem_on_numba(case: Case, seed: int) -> None:
    check(case, "numba", seed)


@pytest.mark.parametrize("impl", [numba, triton])
@pytest.mark.parametrize("case", [Case(33, 12, h=2, e=8, counts=True), Case(20, 9, k=3, mask="ragged")], ids=name)
def test_the_path_is_that_of_the_reference(case: Case, impl: Any) -> None:
    """With log counts, too; and budgets change neither it nor its probabilities."""
    case = small(case, impl)
    given_ = make(case)
    found = search(case, given_, impl)
    wide = given_._replace(**{x: getattr(given_, x).double() for x in ("q", "keys", "values")})
    exact = search(case, wide, "reference")
    assert torch.equal(found.path, exact.path)
    assert error(found.log_prob, exact.log_prob) < 1e-5 and error(found.entropy, exact.entropy) < 1e-5


@pytest.mark.parametrize("impl", [numba, triton])
def test_a_budget_of_all_tokens_is_full_attention(impl: Any) -> None:
    """In a batch, a shorter row is read whole at a smaller budget."""
    case = small(Case(20, 20, k=3, b=3, mask="ragged"), impl)
    given_ = make(case, padding=0.0)
    leaves = SearchInputs(*(x.double() for x in given_[:3]), case.plan, given_.mask)
    want = read_rows(leaves, search(case, given_, "reference").rows).output
    for budget, lse in ((10, False), (20, False), (25, True)):
        found = search(case, given_, impl, budget, lse)
        for row, length in enumerate(case.lengths):
            assert length > budget or error(found.output[row], want[row]) < 2e-6


@each_backend
def test_gradients_follow_the_rows_that_were_read(impl: Any) -> None:
    """Kernels choose the rows; output and log-sum-exp have the gradients of attention to them."""
    case = small(Case(33, 14, k=2, h=2, e=8, mask="ragged", counts=True), impl)
    given_ = make(case)
    leaves = given_._replace(**{x: getattr(given_, x).clone().requires_grad_() for x in ("q", "keys", "values")})
    found = search(case, leaves, impl)
    plain = search(case, given_, impl)
    assert torch.equal(found.rows, plain.rows) and not plain.output.requires_grad
    assert error(found.output, plain.output.double()) < 2e-6 and error(found.lse, plain.lse.double()) < 5e-6
    gradients = torch.autograd.grad(found.output.square().sum() + found.lse.square().sum(), leaves[:3])
    exact = [x.double().requires_grad_() for x in given_[:3]]
    want = read_rows(SearchInputs(*exact, case.plan, given_.mask, log_count=given_.counts), found.rows)
    right = torch.autograd.grad(want.output.square().sum() + want.lse.square().sum(), exact)
    for got, true in zip(gradients, right, strict=True):
        assert error(got, true) < 2e-5
    assert not any(part[~given_.mask].any() for part in gradients[1:])


@each_backend
@pytest.mark.parametrize(("budget", "lse"), [(1, True), (14, False), (20, False), (30, True)])
def test_what_padding_holds_never_matters(impl: Any, budget: int, lse: bool) -> None:
    """For all budgets, those of all tokens included."""
    case = small(Case(20, budget, k=3, h=2, e=8, mask="ragged"), impl)
    dirty, clean = (search(case, make(case, padding=filled), impl, budget, lse) for filled in (torch.nan, 0.0))
    assert torch.equal(dirty.output, clean.output) and torch.equal(dirty.rows, clean.rows)


UNUSUAL = """
import torch
from retreever import TreePlan, tree_attention
torch.manual_seed(0)
plan = TreePlan(33, 2, block=4)  # blocks wider than the tree branches
q, keys = torch.randn(2, 50, 2, 4), torch.randn(2, plan.nodes, 2, 4)
for budget in (12, 20, 32):
    rows = [tree_attention(q, keys, keys, plan, impl=impl, budget=budget).rows for impl in ("IMPL", "reference")]
    assert (rows[0] == rows[1]).float().mean() > 0.9, budget
for branch, n, budgets in ((2, 32, (1, 9, 13, 20, 31)), (8, 64, (20, 43, 60))):
    plan = TreePlan(n, branch)
    q, keys = torch.randn(2, 50, 2, 4), torch.full((2, plan.nodes, 2, 4), torch.nan)
    for budget in budgets:
        found = tree_attention(q, keys, keys, plan, impl="IMPL", budget=budget)
        assert found.output.isnan().all(), budget
        assert (found.rows >= -1).all() and (found.rows < plan.nodes).all(), budget
"""


@pytest.mark.parametrize("impl", ["reference", numba])
def test_unusual_trees_and_keys_that_are_no_numbers_are_searched_safely(impl: Any) -> None:
    """Nothing is written beside the rows, no row is outside the tree, and NaN is in the output."""
    code = UNUSUAL.replace("IMPL", impl)
    if impl == "reference":
        exec(code, {})
    else:  # what is written elsewhere may end the process, now or later
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]


class Guarded:
    """Launches a kernel with room behind the rows it is to write, which must stay as it is."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            place = self.kernel.arg_names.index("rows_out")
            rows, size = args[place], args[place].numel()
            room = rows.new_full((size + 256,), -99)
            self.kernel[grid](*args[:place], room[:size].view_as(rows), *args[place + 1 :], **options)
            assert (room[size:] == -99).all()
            rows.copy_(room[:size].view_as(rows))

        return launch


@pytest.mark.skipif(not (INTERPRETING and TRITON), reason="needs the interpreter of triton")
@pytest.mark.parametrize(("n", "k", "budget"), [(64, 8, 43), (32, 2, 13)])
def test_triton_writes_nothing_beside_the_rows(n: int, k: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where keys are no numbers, so that no child is before another."""
    from retreever.ops.frontier.launch_triton import expand, expand_triton

    monkeypatch.setattr(expand, "kernel", Guarded(expand.kernel))
    case = Case(n, budget, k=k, b=1, m=2, h=1, e=4)
    q, keys, values, mask, *_ = make(case)
    for spoilt in (keys, torch.full_like(keys, torch.nan)):
        inputs = SearchInputs(q, spoilt, values, case.plan, mask)
        rows = expand_triton(inputs, torch.zeros(1, 2, dtype=torch.int64), budget, spread(case.plan, budget, mask))[2]
        assert (rows >= -1).all() and (rows < case.plan.nodes).all()


@each_backend
@pytest.mark.parametrize(("b", "m"), [(0, 3), (2, 0)])
def test_leading_axes_may_be_empty(impl: Any, b: int, m: int) -> None:
    case = Case(16, 6, b=b, m=m, h=2, e=8)
    found = search(case, make(case), impl)
    assert found.output.shape == (b, m, 2, 8) and found.lse.shape == (b, m, 2) and found.rows.shape[:2] == (b, m)


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
def test_the_result_is_the_same_to_the_last_bit_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(60, 30, b=3, m=40, mask="ragged", noise=True)
    given_ = make(case)
    once = search(case, given_, "numba")
    monkeypatch.setattr("retreever.ops.search.launch_numba.GRAIN", 1)  # every call is worth all threads
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert all(torch.equal(x, y) for x, y in zip(search(case, given_, "numba"), once, strict=True))


@pytest.mark.skipif(not (INTERPRETING and TRITON), reason="needs the interpreter of triton")
def test_a_tile_too_large_for_the_kernel_is_read_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import retreever.ops.frontier.launch_triton as launch

    monkeypatch.setattr(launch, "LARGEST", 0)
    monkeypatch.setattr(launch, "expand_triton", None)
    check(Case(16, 9, h=2, e=8, b=1, m=1), "triton")


# ------------------------------------------------------------------------------------------------ compiling for a GPU


@pytest.mark.skipif(INTERPRETING or not TRITON, reason="the interpreter does not compile")
def test_kernels_compile_for_hopper(ahead_of_time: Any) -> None:
    """With all optional inputs, and children sorted by their shares."""
    from retreever.ops.frontier.launch_triton import expand, expand_triton

    ahead_of_time.record(expand, "kernel")
    case = Case(300, 260, k=64, h=1, e=4, mask="ragged", counts=True, dtype=torch.bfloat16)
    given_ = make(case)
    inputs = SearchInputs(*given_[:3], case.plan, given_.mask, log_count=given_.counts)
    path = torch.zeros(case.b, case.m, dtype=torch.int64)
    expand_triton(inputs, path, case.budget, spread(case.plan, case.budget, given_.mask))
    (launch,) = ahead_of_time.launches
    assert ahead_of_time.compile(launch) > 0
