"""The Numba kernels against the float64 reference, and what surrounds them: threads, forks, caches, torch.compile."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from retreever.errors import BackendError
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import search_reference
from retreever.tree.order import leaf_layout
from retreever.tree.plan import TreePlan

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)


import retreever.ops.search.launch_numba as backend
import retreever.ops.search.threads_numba as threads

TIE = 1e-5  # policies closer than this may be decided either way


def numba_search(*inputs: Any) -> tuple[Tensor, ...]:
    return backend.search_numba(SearchInputs(*inputs))


def plain_search(*inputs: Any) -> tuple[Tensor, ...]:
    return search_reference(SearchInputs(*inputs))


@dataclass(frozen=True)
class Case:
    """One problem. `mask`: none, ragged lengths, or a single real token in every row."""

    n: int
    k: int = 2
    b: int = 2
    m: int = 3
    h: int = 4
    e: int = 16
    mask: str = ""
    noise: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def plan(self) -> TreePlan:
        return TreePlan(self.n, self.k, block=min(self.n, self.k) if self.mask else 0)


@dataclass
class Inputs:
    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    noise: Tensor | None

    def to(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.to(dtype).requires_grad_() for x in (self.q, self.keys, self.values)]


def node_mask(plan: TreePlan, lengths: Tensor) -> Tensor:
    levels = [leaf_layout(plan, lengths).real]
    for level in range(plan.depth, 0, -1):
        levels.insert(0, levels[0].reshape(len(lengths), plan.branch**level, -1).any(dim=2))
    return torch.cat(levels, dim=1)


def make(case: Case, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    plan = case.plan
    q = torch.randn(case.b, case.m, case.h, case.e, dtype=case.dtype)
    keys, values = torch.randn(2, case.b, plan.nodes, case.h, case.e, dtype=case.dtype)
    lengths = {"ragged": torch.linspace(case.n, 1, case.b).long(), "one": torch.ones(case.b, dtype=torch.int64)}
    mask = node_mask(plan, lengths[case.mask]) if case.mask else None
    noise = torch.rand(case.b, case.m, plan.depth, dtype=case.dtype) if case.noise else None
    return Inputs(q, keys, values, mask, noise)


def run(function: Any, case: Case, tensors: list[Tensor], inputs: Inputs, slopes: list[Tensor]) -> list[Tensor]:
    """Output, path, log_prob, entropy and the gradients of q, keys, values."""
    results = function(*tensors, case.plan, inputs.mask, inputs.noise)
    floats = (results[0], *results[2:])
    loss = sum((x * slope.to(x)).sum() for x, slope in zip(floats, slopes, strict=True))
    gradients = torch.autograd.grad(loss, tensors, materialize_grads=True, allow_unused=True)
    return [x.detach() for x in (*results, *gradients)]


def clear_cut(case: Case, inputs: Inputs) -> Tensor:
    """(b, m): queries of which no decision is so close that rounding could turn it."""
    q, keys, _ = (x.detach() for x in inputs.to(torch.float64))
    plan, batch = case.plan, torch.arange(case.b)[:, None, None]
    path = plain_search(q, keys, keys, plan, inputs.mask, inputs.noise)[1]
    clear = torch.ones(case.b, case.m, dtype=torch.bool)
    for level in range(1, plan.depth + 1):
        node = path // plan.branch ** (plan.depth - level + 1)
        rows = plan.offsets[level] + node[..., None] * plan.branch + torch.arange(plan.branch)
        scores = (q[:, :, None] * keys[batch, rows]).sum(-1) * case.e**-0.5
        if inputs.mask is not None:
            scores = scores.masked_fill(~inputs.mask[batch, rows][..., None], -torch.inf)
        policy = scores.softmax(dim=2).mean(dim=3)
        if inputs.noise is None:
            best = policy.topk(2, dim=2).values
            gap = best[..., 0] - best[..., 1]
        else:
            gap = (inputs.noise[..., level - 1, None] - policy.cumsum(dim=2)).abs().amin(dim=2)
        clear &= gap >= TIE
    return clear


def check(case: Case, seed: int = 0) -> None:
    """Errors of at most twice (gradients: thrice) those of the reference in the same dtype, on queries clear cut."""
    inputs = make(case, seed)
    clear = clear_cut(case, inputs)
    slopes = [x * clear.reshape(clear.shape + (1,) * (x.dim() - 2)) for x in make_slopes(case)]
    exact = run(plain_search, case, inputs.to(torch.float64), inputs, slopes)
    plain = run(plain_search, case, inputs.to(case.dtype), inputs, slopes)
    nodes = inputs.to(case.dtype)
    if inputs.mask is not None:  # nothing that padding holds may matter
        nodes = [nodes[0], *(x.detach().clone() for x in nodes[1:])]
        nodes[1][~inputs.mask] = nodes[2][~inputs.mask] = torch.nan
        nodes[1:] = [x.requires_grad_() for x in nodes[1:]]
    ours = run(numba_search, case, nodes, inputs, slopes)
    assert ours[1].dtype == torch.int64 and torch.equal(ours[1][clear], exact[1][clear])
    assert all(x.dtype == case.dtype for i, x in enumerate(ours) if i != 1)
    names = ("output", "path", "log_prob", "entropy", "grad q", "grad keys", "grad values")
    for i, name in enumerate(names):
        if i == 1:
            continue
        pick = clear if i < 4 else slice(None)
        mine, reference, truth = (x[i][pick].double() for x in (ours, plain, exact))
        if truth.numel() == 0:
            continue
        band = 8 * torch.finfo(case.dtype).eps * max(1.0, float(truth.abs().max()))
        allowed = (2 if i < 4 else 3) * float((reference - truth).abs().max()) + band
        assert float((mine - truth).abs().max()) <= allowed, name
    if inputs.mask is not None:
        assert (ours[5][~inputs.mask] == 0).all() and (ours[6][~inputs.mask] == 0).all()


def make_slopes(case: Case) -> list[Tensor]:
    queries = (case.b, case.m)
    return [torch.randn(*queries, case.h, case.e), torch.randn(queries), torch.randn(queries)]


# ------------------------------------------------------------------------------------------------ values and gradients

CASES = [
    Case(1), Case(1, m=257, h=1, e=8), Case(2, h=2, e=8, noise=True), Case(3, k=3, h=1), Case(5, k=8, h=8, e=32),
    Case(8), Case(9, k=3, m=1, noise=True), Case(17, k=4, h=2, e=60), Case(63, m=16), Case(63, k=16, h=8, e=8),
    Case(100, k=256, m=17), Case(128, m=257, noise=True), Case(129, k=2, h=1, e=128), Case(129, k=8, e=64, m=33),
    Case(1000, m=257, b=1), Case(1000, k=3, h=8, e=60, noise=True), Case(1000, k=256, h=2, m=20, noise=True),
    Case(1000, k=16, e=32, b=3), Case(128, k=2, h=3, e=20, m=5, noise=True),
    Case(1, mask="one"), Case(3, mask="ragged"), Case(9, k=3, mask="ragged", b=4, m=17, noise=True),
    Case(63, mask="ragged", b=3, m=40), Case(100, k=4, mask="one", noise=True), Case(100, k=256, mask="ragged", h=2),
    Case(129, k=8, mask="ragged", e=60, m=257), Case(1000, mask="ragged", b=3, noise=True), Case(17, mask="one", m=33),
    Case(129, dtype=torch.float64, m=20), Case(100, k=3, h=2, e=60, noise=True, dtype=torch.float64),
    Case(63, k=4, mask="ragged", b=3, dtype=torch.float64), Case(1000, k=16, m=1, h=8, e=8, dtype=torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_the_reference(case: Case) -> None:
    check(case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.builds(
        Case,
        n=st.integers(1, 90),
        k=st.integers(2, 9),
        b=st.integers(1, 3),
        m=st.sampled_from([1, 2, 7, 16, 18]),
        h=st.integers(1, 5),
        e=st.sampled_from([1, 3, 8, 16, 17, 31, 32, 48]),
        mask=st.sampled_from(["", "ragged", "one"]),
        noise=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    ),
    seed=st.integers(0, 5),
)
def test_any_small_problem(case: Case, seed: int) -> None:
    check(case, seed)


def check_single(case: Case, inputs: Inputs) -> None:
    """One query a row without gradients, which has a kernel of its own, against the reference."""
    tensors = inputs.q, inputs.keys, inputs.values
    exact = plain_search(*(x.double() for x in tensors), case.plan, None, None)
    ours = numba_search(*tensors, case.plan, None, None)
    clear = clear_cut(case, inputs)
    assert torch.equal(ours[1][clear], exact[1][clear])
    for mine, truth in zip((ours[0], *ours[2:]), (exact[0], *exact[2:]), strict=True):
        assert mine.dtype == case.dtype and mine.shape == truth.shape and mine.is_contiguous()
        precision = 1e-5 if case.dtype == torch.float32 else 1e-13
        torch.testing.assert_close(mine[clear].double(), truth[clear], rtol=precision, atol=precision)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.builds(
        Case,
        n=st.integers(1, 300),
        k=st.sampled_from([2, 3, 4, 9, 70]),
        b=st.sampled_from([1, 2, 16, 17]),
        m=st.just(1),
        h=st.sampled_from([1, 2, 3, 8, 16, 17]),
        e=st.sampled_from([1, 3, 8, 16, 17, 48]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    ),
    side_by_side=st.booleans(),
)
def test_any_single_query(case: Case, side_by_side: bool) -> None:
    inputs = make(case)
    if side_by_side:  # keys and values as halves of one tensor, as a tree holds them
        inputs.keys, inputs.values = torch.stack([inputs.keys, inputs.values], dim=2).unbind(dim=2)
    check_single(case, inputs)


def test_a_single_query_takes_keys_and_values_however_they_lie() -> None:
    case = Case(50, m=1)
    for turn in range(3):
        inputs = make(case)
        name = ("q", "keys", "values")[turn]
        setattr(inputs, name, getattr(inputs, name).transpose(2, 3).contiguous().transpose(2, 3))
        check_single(case, inputs)


def test_a_single_query_with_extreme_scores() -> None:
    """Probabilities that underflow give finite logarithms, and NaN ends somewhere in the tree."""
    case = Case(33, k=4, b=1, m=1)
    inputs = make(case)
    inputs.q *= 300
    ours = numba_search(inputs.q, inputs.keys, inputs.values, case.plan, None, None)
    plain = plain_search(inputs.q, inputs.keys, inputs.values, case.plan, None, None)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
    inputs.q[0, 0, 1, 0] = torch.nan
    output, path, *_ = numba_search(inputs.q, inputs.keys, inputs.values, case.plan, None, None)
    assert output[0, 0, 1].isnan().all() and output[0, 0, 0].isfinite().all() and 0 <= int(path) < case.plan.blocks


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_gradients_flow_through_each_result_alone(wanted: tuple[int, ...]) -> None:
    case = Case(17, k=3, dtype=torch.float64, mask="ragged")
    inputs = make(case)
    slopes = make_slopes(case)
    gradients = []
    for function in (numba_search, plain_search):
        tensors = inputs.to(torch.float64)
        results = function(*tensors, case.plan, inputs.mask, inputs.noise)
        used = [(x * y).sum() for x, y, w in zip((results[0], *results[2:]), slopes, wanted, strict=True) if w]
        gradients.append(torch.autograd.grad(sum(used), tensors, materialize_grads=True, allow_unused=True))
    for mine, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


def test_extreme_scores_stay_finite() -> None:
    """Probabilities that underflow: the clamp of the reference, in value and gradient."""
    case = Case(33, k=4, dtype=torch.float32)
    inputs = make(case)
    inputs.q *= 300
    slopes = make_slopes(case)
    ours = run(numba_search, case, inputs.to(torch.float32), inputs, slopes)
    plain = run(plain_search, case, inputs.to(torch.float32), inputs, slopes)
    assert all(x.isfinite().all() for x in ours)
    torch.testing.assert_close(ours[:4], plain[:4], rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------------------------------------ choices


def two_levels(policy: list[float]) -> tuple[TreePlan, Tensor, Tensor]:
    """A tree whose first decision has exactly this policy, with one head."""
    plan = TreePlan(len(policy) + 1, len(policy))
    keys = torch.zeros(1, plan.nodes, 1, 1)
    keys[0, : len(policy), 0, 0] = torch.tensor(policy).log()
    return plan, torch.ones(1, 1, 1, 1), keys


def chosen(policy: list[float], noise: float | None) -> int:
    plan, q, keys = two_levels(policy)
    uniform = None if noise is None else torch.full((1, 1, plan.depth), noise)
    return int(numba_search(q, keys, keys, plan, None, uniform)[1])


def test_a_tie_goes_to_the_first_child() -> None:
    assert chosen([0.25, 0.25, 0.25, 0.25], None) == 0
    assert chosen([0.2, 0.4, 0.4], None) == 1


def test_noise_is_an_inverse_cdf() -> None:
    for noise, child in ((0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.999, 2)):
        assert chosen([0.2, 0.3, 0.5], noise) == child


def test_noise_never_picks_a_child_without_probability() -> None:
    above_the_cdf = 1.0  # what rounding of a uniform may give
    assert chosen([0.5, 0.5, 0.0], above_the_cdf) == 1
    assert chosen([0.0, 0.5, 0.5], 0.0) == 1
    assert chosen([0.5, 0.0, 0.5], 0.5) == 2


def test_noise_out_of_range_stays_in_the_tree() -> None:
    assert [chosen([0.5, 0.3, 0.2], noise) for noise in (3.9, 90.0, math.inf, math.nan)] == [2, 2, 2, 2]


# ------------------------------------------------------------------------------------------------ memory layouts


def test_strided_views_give_the_same_result() -> None:
    case = Case(100, k=3, b=2, m=19, mask="ragged", noise=True)
    inputs = make(case)
    tensors = (inputs.q, inputs.keys, inputs.values)
    slopes = make_slopes(case)
    expected = run(numba_search, case, [x.clone().requires_grad_() for x in tensors], inputs, slopes)
    halves = torch.stack(tensors[1:], dim=2).unbind(2)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    last_axis = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]
    assert inputs.mask is not None and inputs.noise is not None
    inputs.mask = inputs.mask.t().contiguous().t()
    inputs.noise = inputs.noise.double().transpose(1, 2).contiguous().transpose(1, 2)
    for views in ((inputs.q, *halves), by_head, last_axis):
        leaves = [x.detach().requires_grad_() for x in views]
        assert any(not x.is_contiguous() for x in leaves)
        results = run(numba_search, case, leaves, inputs, slopes)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_one_tree_expanded_over_the_batch() -> None:
    case = Case(50, b=3)
    inputs = make(case)
    inputs.keys, inputs.values = (x[:1].expand(3, -1, -1, -1) for x in (inputs.keys, inputs.values))
    dense = [x.contiguous() for x in (inputs.keys, inputs.values)]
    mine = numba_search(inputs.q, inputs.keys, inputs.values, case.plan, None, None)
    copied = numba_search(inputs.q, dense[0], dense[1], case.plan, None, None)
    assert all(torch.equal(x, y) for x, y in zip(mine, copied, strict=True))


@pytest.mark.parametrize("b, m", [(0, 3), (2, 0)])
def test_nothing_to_do(b: int, m: int) -> None:
    case = Case(9, b=b, m=m)
    inputs = make(case)
    results = run(numba_search, case, inputs.to(torch.float32), inputs, make_slopes(case))
    assert results[0].shape == (b, m, 4, 16) and results[1].shape == (b, m)
    assert all((x == 0).all() for x in results[5:])


# ------------------------------------------------------------------------------------------------ threads


def test_the_result_is_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every run and every number of threads."""
    case = Case(100, b=3, m=70, noise=True, mask="ragged")
    inputs, slopes = make(case), make_slopes(case)
    once = run(numba_search, case, inputs.to(torch.float32), inputs, slopes)
    monkeypatch.setattr(backend, "GRAIN", 1)  # every call is worth all threads
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for _ in range(10):
            again = run(numba_search, case, inputs.to(torch.float32), inputs, slopes)
            assert all(torch.equal(x, y) for x, y in zip(again, once, strict=True))
    assert threads.team.size == 4


def test_helpers_keep_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "GRAIN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    case = Case(100, m=100)
    inputs = make(case)
    results = numba_search(inputs.q, inputs.keys, inputs.values, case.plan, None, None)
    traces = [weakref.ref(x) for x in (*results, inputs.q, inputs.keys)]
    del results, inputs
    gc.collect()
    assert [trace() for trace in traces] == [None] * len(traces)


def fresh_python(code: str, **environment: str) -> str:
    """What `code` prints in a new interpreter, which must end well and complain of nothing."""
    setup = (
        "import torch\nfrom retreever.ops.search import launch_numba as backend, threads_numba as threads\n"
        "from retreever.ops.search.inputs import SearchInputs\nfrom retreever.tree.plan import TreePlan\n"
    )
    source = str(Path(backend.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", setup + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": source, **environment},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_workers_can_use_threads_after_the_parent_did() -> None:
    """Both a plain fork and the workers of a DataLoader; Numba's own parallel layer would have them killed."""
    code = """
import os, sys, warnings
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(2)
plan = TreePlan(300)
q, keys, values = torch.randn(1, 500, 4, 16), *torch.randn(2, 1, plan.nodes, 4, 16)
search = lambda: backend.search_numba(SearchInputs(q, keys, values, plan))[0]
backend.GRAIN = 1000
expected = search()
assert threads.team.size == 1

class Searches(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        torch.set_num_threads(2)
        return search()

warnings.simplefilter("ignore")  # of a fork beside threads, and of more workers than processors
child = os.fork()
if child == 0:
    assert threads.team.size == 0
    same = torch.equal(search(), expected) and threads.team.size == 1
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loader = DataLoader(Searches(), batch_size=None, num_workers=2, multiprocessing_context="fork")
assert all(torch.equal(x, expected) for x in loader)
assert torch.equal(search(), expected)
print("ok")
"""
    assert fresh_python(code) == "ok"


# ------------------------------------------------------------------------------------------------ torch.compile and ops


def op_inputs(**options: Any) -> tuple[Any, ...]:
    case = Case(17, k=3, h=2, e=8, dtype=torch.float64, **options)
    inputs = make(case)
    plan = case.plan
    return *inputs.to(torch.float64), inputs.mask, inputs.noise, None, plan.branch, plan.depth, plan.block


@pytest.mark.parametrize("options", [{}, {"mask": "ragged", "noise": True}], ids=str)
def test_the_custom_ops_keep_their_promises(options: dict[str, Any]) -> None:
    given_inputs = op_inputs(**options)
    torch.library.opcheck(backend._forward_op, given_inputs)
    q, keys, values, mask, _, _, *sizes = (x.detach() if isinstance(x, Tensor) else x for x in given_inputs)
    output, path, log_prob, entropy, lse = backend._forward_op(*(x for x in given_inputs))
    grads = (torch.randn_like(q), torch.randn_like(log_prob).detach(), torch.randn_like(entropy).detach())
    saved = (q, keys, values, mask, path, output.detach(), lse.detach())
    torch.library.opcheck(backend._backward_op, (*grads, *saved, *sizes))


def test_compile_takes_it_whole() -> None:
    case = Case(40, noise=True, dtype=torch.float64)
    inputs, slopes = make(case), make_slopes(case)

    def model(q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, mask: Any, noise: Any) -> tuple[Tensor, ...]:
        return numba_search(q * 2, keys, values, plan, mask, noise)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = [run(function, case, inputs.to(torch.float64), inputs, slopes) for function in (model, compiled)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    with torch.no_grad():
        plain = compiled(inputs.q, inputs.keys, inputs.values, case.plan, None, inputs.noise)
    assert all(torch.equal(x, y) for x, y in zip(plain, results[0][:4], strict=True))


def test_all_ways_to_the_kernel_agree() -> None:
    """Without gradient, with, through the custom op, and with parameters, which are not plain tensors."""
    case = Case(40, mask="ragged", noise=True)
    inputs = make(case)
    tensors, rest = (inputs.q, inputs.keys, inputs.values), (case.plan, inputs.mask, inputs.noise)
    direct = numba_search(*tensors, *rest)
    assert not any(x.requires_grad for x in direct)
    recorded = numba_search(*inputs.to(torch.float32), *rest)
    assert [x.requires_grad for x in recorded] == [True, False, True, True]
    parameters = numba_search(*(torch.nn.Parameter(x) for x in tensors), *rest)
    assert [x.requires_grad for x in parameters] == [True, False, True, True]
    with torch.inference_mode():
        inferred = numba_search(*tensors, *rest)
    for other in (recorded, parameters, inferred):
        assert all(torch.equal(x, y) for x, y in zip(other, direct, strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = numba_search(*tensors, *rest)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in direct]


def test_second_derivatives_are_refused() -> None:
    case = Case(9)
    inputs = make(case)
    tensors = inputs.to(torch.float32)
    output = numba_search(*tensors, case.plan, None, None)[0]
    (slope,) = torch.autograd.grad(output.sum(), tensors[:1], create_graph=True)
    with pytest.raises(BackendError, match="impl='reference' has them"):
        slope.sum().backward()


# ------------------------------------------------------------------------------------------------ caches


def test_a_cache_folder_is_a_convenience(tmp_path: Path) -> None:
    """Without a place to write to, kernels are compiled for the process alone, and nobody is told."""
    (tmp_path / "file").touch()
    code = """
plan = TreePlan(9)
q, keys = torch.randn(1, 2, 1, 4), torch.randn(1, plan.nodes, 1, 4)
backend.search_numba(SearchInputs(q, keys, keys, plan))
print(backend._FORWARD.kernel.stats.cache_path)
"""
    nowhere = {
        "NUMBA_CACHE_DIR": str(tmp_path / "file" / "below"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
        "NUMBA_OPT": "0",  # compiles faster
    }
    assert fresh_python(code, **nowhere) == "None"


def test_a_damaged_cache_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        py_func = staticmethod(backend._BACKWARD_NODES.kernel.py_func)

        def compile(self, signature: Any) -> None:
            raise OSError("disk full")

    entry, one = threads.Entries(Broken(), 7, 7)[torch.float32]
    entry((0,) * 7, (1,) * 7, 0, 0, one)
