"""The Triton kernels against the float64 reference: in Triton's interpreter on the CPU, and compiled on a CUDA device.

Which of the two is decided for the whole process, before triton is imported (conftest.py): the tests below run on CPU
tensors in the interpreter, and otherwise are marked `gpu`. Without a GPU the kernels are still compiled, in a process
of their own, for what the interpreter does not see.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import search_reference
from retreever.tree.order import leaf_layout
from retreever.tree.plan import TreePlan

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import retreever.ops.search.launch_triton as backend
from retreever.ops.search import backward_triton, tiles_triton

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING else "cuda"
TIE = 1e-5  # policies closer than this may be decided either way


def triton_search(*inputs: Any) -> tuple[Tensor, ...]:
    return backend.search_triton(SearchInputs(*inputs))


def plain_search(*inputs: Any) -> tuple[Tensor, ...]:
    return search_reference(SearchInputs(*inputs))


def on_device(test: Any) -> Any:
    """Run a test where the kernels run: here if this is the interpreter, else on a CUDA device."""
    if INTERPRETING:
        return test
    needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(needs_cuda(test))


def cuda_only(test: Any) -> Any:
    return pytest.mark.skip(reason="needs a CUDA device")(test) if INTERPRETING else on_device(test)


# ------------------------------------------------------------------------------------------------ cases and inputs


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
    views: bool = False

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


def node_mask(plan: TreePlan, lengths: Tensor) -> Tensor:
    levels = [leaf_layout(plan, lengths).real]
    for level in range(plan.depth, 0, -1):
        levels.insert(0, levels[0].reshape(len(lengths), plan.branch**level, -1).any(dim=2))
    return torch.cat(levels, dim=1)


def make(case: Case, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    plan, shape = case.plan, (case.b, case.plan.nodes, case.h, case.e)
    q = torch.randn(case.b, case.m, case.h, case.e)
    keys, values = torch.randn(shape), torch.randn(shape)
    lengths = {"ragged": torch.linspace(case.n, 1, case.b).long(), "one": torch.ones(case.b, dtype=torch.int64)}
    mask = node_mask(plan, lengths[case.mask]) if case.mask else None
    noise = torch.rand(case.b, case.m, plan.depth) if case.noise else None
    q, keys, values = (x.to(case.dtype) for x in (q, keys, values))
    return Inputs(q, keys, values, mask, noise)


def run(case: Case, given: Inputs, slopes: tuple[Tensor, ...] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the backend, on the CPU, and with `slopes` the gradients. Padding nodes hold NaN: nothing reads it."""
    q, keys, values = (x.clone() for x in (given.q, given.keys, given.values))
    if given.mask is not None:
        keys[~given.mask] = values[~given.mask] = torch.nan
    q, keys, values = (x.to(DEVICE).requires_grad_(slopes is not None) for x in (q, keys, values))
    inner_q, inner_keys, inner_values = q, keys, values
    if case.views:  # halves of one tensor, and an axis that is not dense
        inner_keys, inner_values = torch.stack([keys, values], dim=2).unbind(2)
        inner_q = q.transpose(2, 3).contiguous().transpose(2, 3)
    mask, noise = (None if x is None else x.to(DEVICE) for x in (given.mask, given.noise))
    results = triton_search(inner_q, inner_keys, inner_values, case.plan, mask, noise)
    gradients: list[Tensor] = []
    if slopes is not None:
        loss = sum((x * y.to(x)).sum() for x, y in zip((results[0], *results[2:]), slopes, strict=True))
        gradients = [x.cpu() for x in torch.autograd.grad(loss, (q, keys, values))]
    return [x.detach().cpu() for x in results], gradients


def reference(
    case: Case, given: Inputs, dtype: torch.dtype, slopes: tuple[Tensor, ...] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    q, keys, values = (x.to(dtype).requires_grad_(slopes is not None) for x in (given.q, given.keys, given.values))
    results = plain_search(q, keys, values, case.plan, given.mask, given.noise)
    gradients: list[Tensor] = []
    if slopes is not None:
        loss = sum((x * y.to(x)).sum() for x, y in zip((results[0], *results[2:]), slopes, strict=True))
        gradients = list(torch.autograd.grad(loss, (q, keys, values)))
    return [x.detach() for x in results], gradients


def decided(case: Case, given: Inputs) -> Tensor:
    """(b, m): queries of which no decision is so close that rounding could turn it."""
    q, keys = given.q.double(), given.keys.double()
    plan, batch = case.plan, torch.arange(case.b)[:, None, None]
    path = reference(case, given, torch.float64)[0][1]
    clear = torch.ones(case.b, case.m, dtype=torch.bool)
    for level in range(1, plan.depth + 1):
        node = path // plan.branch ** (plan.depth - level + 1)
        rows = plan.offsets[level] + node[..., None] * plan.branch + torch.arange(plan.branch)
        scores = (q[:, :, None] * keys[batch, rows]).sum(-1) * case.e**-0.5
        if given.mask is not None:
            scores = scores.masked_fill(~given.mask[batch, rows][..., None], -torch.inf)
        policy = scores.softmax(dim=2).mean(dim=3)
        if given.noise is None:
            best = policy.topk(2, dim=2).values
            gap = best[..., 0] - best[..., 1]
        else:
            gap = (given.noise[..., level - 1, None] - policy.cumsum(dim=2)).abs().amin(dim=2)
        clear &= gap >= TIE
    return clear


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max()) if want.numel() else 0.0


def close(got: Tensor, same: Tensor, want: Tensor, factor: float) -> bool:
    """Error of `got` within `factor` times that of the reference in the same dtype, or within its rounding."""
    bound = factor * error(same, want) + 8 * torch.finfo(got.dtype).eps * max(1.0, float(want.abs().max()))
    return error(got, want) <= bound


# ------------------------------------------------------------------------------------------------ comparisons

FORWARD = [
    Case(1, h=1, e=8, m=1),
    Case(2, h=2, e=32),
    Case(3, h=3, e=8, noise=True),
    Case(5, k=3, e=60),
    Case(5, k=8, e=64),
    Case(8, e=128, h=2, mask="ragged"),
    Case(9, mask="one", noise=True),
    Case(17, k=4, h=8, mask="ragged", dtype=torch.bfloat16),
    Case(63, k=8, e=8, noise=True, dtype=torch.float16),
    Case(100, k=16, mask="ragged", noise=True),
    Case(128, h=1, e=16, b=1, m=257),
    Case(129, e=8, views=True),
    Case(1000, b=1, noise=True),
    Case(1000, k=256, b=1, h=4, e=16, noise=True, mask="ragged"),
    Case(300, k=256, b=2, m=1, h=8, e=16),
    Case(200, k=256, b=1, h=8, e=32),
    Case(40, k=32, b=1, m=1, h=8, e=64, noise=True),
]
GRADIENT = [
    Case(1, m=1),
    Case(2, h=1, e=8, b=1),
    Case(3, h=3, e=60, noise=True, mask="ragged"),
    Case(5, k=8, e=32),
    Case(9, b=1, e=8, mask="one"),
    Case(17, k=3, h=2, e=8, noise=True, mask="ragged"),
    Case(17, k=4, b=1, h=8, e=16, views=True),
    Case(9, k=8, h=4, e=128, b=1),
    Case(5, b=1, dtype=torch.bfloat16, noise=True),
    Case(3, m=70, h=1, e=8, noise=True, mask="ragged"),
    Case(3, b=1, m=257, h=2, e=8),
]


def name(case: Case) -> str:
    parts = [f"n{case.n}", f"k{case.k}", f"b{case.b}", f"m{case.m}", f"h{case.h}", f"e{case.e}", case.mask]
    parts += ["noise" * case.noise, "views" * case.views, str(case.dtype)[6:]]
    return "-".join(part for part in parts if part)


def check_forward(case: Case) -> None:
    given = make(case)
    got, _ = run(case, given)
    same, _ = reference(case, given, case.dtype)
    want, _ = reference(case, given, torch.float64)
    clear = decided(case, given)
    assert clear.float().mean() > 0.9
    assert torch.equal(got[1][clear], want[1][clear])
    for result, like, true in zip(got, same, want, strict=True):
        if result.dtype.is_floating_point:
            assert result.dtype == like.dtype
            assert close(result[clear], like[clear], true[clear], 2)


def check_gradients(case: Case) -> None:
    given = make(case)
    clear = decided(case, given).double()
    slopes = (torch.randn(given.q.shape) * clear[..., None, None], *torch.randn(2, case.b, case.m) * clear)
    _, got = run(case, given, slopes)
    _, same = reference(case, given, case.dtype, slopes)
    _, want = reference(case, given, torch.float64, slopes)
    for gradient, like, true in zip(got, same, want, strict=True):
        assert gradient.dtype == like.dtype
        assert close(gradient, like, true, 3)
    if given.mask is not None:
        assert not got[1][~given.mask].any() and not got[2][~given.mask].any()


def force_tiles(patch: pytest.MonkeyPatch, queries: int, children: int = 0, length: int = 32) -> None:
    """Other tiles than the sizes would get: more queries, children in pieces. Also fewer programs to interpret."""
    for_queries, for_nodes = backend.query_tile, backend.node_tile

    def query_tile(*sizes: int) -> Any:
        tile = for_queries(*sizes)
        return tile._replace(queries=queries, shape=(queries, children or tile.shape[1], *tile.shape[2:]))

    def node_tile(*sizes: int) -> Any:
        tile = for_nodes(*sizes)
        held = children or tile.children
        return tile._replace(children=held, length=length, shape=(queries, held, length, *tile.shape[3:]))

    patch.setattr(backend, "query_tile", query_tile)
    patch.setattr(backend, "node_tile", node_tile)


def interpreted(case: Case, patch: pytest.MonkeyPatch) -> Case:
    """In the interpreter, many queries are four tiles of 16 and three more: more tiles say nothing new."""
    if not INTERPRETING or case.m <= 16:
        return case
    force_tiles(patch, queries=16)
    return replace(case, m=min(case.m, 67))


@on_device
@pytest.mark.parametrize("case", FORWARD, ids=name)
def test_forward_is_as_exact_as_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_forward(interpreted(case, monkeypatch))


LATE = [
    *(case for case in FORWARD if case.k == 2),
    Case(65, b=1, m=5, h=3, e=60, mask="ragged", dtype=torch.bfloat16),
    Case(200, b=1, m=4, e=64, noise=True, dtype=torch.bfloat16, views=True),
]


@on_device
@pytest.mark.parametrize("case", LATE, ids=name)
def test_values_may_be_read_after_the_choice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_triton, "MANY_BYTES", 0)
    check_forward(interpreted(case, monkeypatch))


@pytest.mark.parametrize("case, late", [
    (Case(9, b=1, m=4096, e=64, dtype=torch.bfloat16), True),
    (Case(9, b=2, m=2048, e=64, dtype=torch.bfloat16), True),
    (Case(9, b=1, m=2047, e=64), False),
    (Case(9, b=1, m=4096, e=16, dtype=torch.bfloat16), False),
    (Case(9, k=3, b=1, m=4096, e=64), False),
    (Case(9, b=1, m=8, h=64, e=8192), False),  # a row too wide for two children side by side
])  # fmt: skip
def test_values_are_read_late_when_bytes_are_the_limit(case: Case, late: bool) -> None:
    plan = case.plan
    tree = backend.TreeShape(plan.branch, plan.depth, plan.block)
    tile = backend.query_tile((case.b * case.m).bit_length(), plan.branch, tree.widest, case.h, case.e)
    assert backend.reads_late(torch.empty(case.b, case.m, case.h, case.e, dtype=case.dtype), tree, tile) is late


@cuda_only
def test_late_values_of_a_large_tree() -> None:
    """Many programs and many levels: where a compiler could go wrong that the interpreter does not show."""
    case = Case(1 << 16, b=1, m=4096, e=64, dtype=torch.bfloat16, noise=True)
    check_forward(case)


@on_device
@pytest.mark.parametrize("case", GRADIENT, ids=name)
def test_gradients_are_as_exact_as_those_of_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_gradients(interpreted(case, monkeypatch))


@on_device
@pytest.mark.parametrize("mask", ["", "ragged"])
def test_children_in_pieces(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles(monkeypatch, queries=4, children=2)
    case = Case(17, k=8, b=1, m=4, h=2, e=8, mask=mask, noise=bool(mask))
    check_forward(case)
    check_gradients(case)


@on_device
def test_one_slope_at_a_time() -> None:
    case = Case(3, h=2, e=8, b=1, noise=True)
    given = make(case)
    for only in range(3):  # which of output, log_prob and entropy the loss depends on
        slopes = [torch.zeros(given.q.shape), torch.zeros(1, 3), torch.zeros(1, 3)]
        slopes[only] = torch.randn(slopes[only].shape)
        _, got = run(case, given, tuple(slopes))
        _, want = reference(case, given, torch.float64, tuple(slopes))
        assert all(error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))


@on_device
def test_same_bits_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, m=40, h=1, e=8, b=1) if INTERPRETING else Case(513, m=4096, b=4)
    if INTERPRETING:
        force_tiles(monkeypatch, queries=16)
    given = make(case)
    slopes = (torch.randn(given.q.shape), *torch.randn(2, case.b, case.m))
    first, second = run(case, given, slopes), run(case, given, slopes)
    for x, y in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(x, y)


@on_device
def test_leading_axes_may_be_empty() -> None:
    for shape in ((0, 3), (2, 0)):
        case = Case(5, b=shape[0], m=shape[1], h=1, e=8)
        given = make(case)
        results, gradients = run(case, given, (torch.zeros(given.q.shape), torch.zeros(shape), torch.zeros(shape)))
        assert results[0].shape == given.q.shape and results[1].shape == shape
        assert all(not x.any() for x in gradients)


@cuda_only  # the interpreter refuses to search NaN
def test_nan_stays_inside_the_tree() -> None:
    case = Case(9, k=3, b=1, m=2, h=1, e=8)
    given = make(case)
    given.q[:] = torch.nan
    for noise in (None, torch.rand(1, 2, case.plan.depth)):
        given.noise = noise
        path = run(case, given)[0][1]
        assert (path >= 0).all() and (path < case.plan.blocks).all()


# ------------------------------------------------------------------------------------------------ torch integration


def operands(case: Case, grad: bool = True) -> tuple[Any, ...]:
    given = make(case)
    tensors = [x.to(DEVICE).requires_grad_(grad) for x in (given.q, given.keys, given.values)]
    mask, noise = (None if x is None else x.to(DEVICE) for x in (given.mask, given.noise))
    return (*tensors, mask, noise)


@on_device
def test_operators_pass_opcheck() -> None:
    case = Case(3, b=1, m=2, h=1, e=8, mask="ragged", noise=True)
    shape = (case.plan.branch, case.plan.depth, case.plan.block)
    args = operands(case)
    choices = torch.full_like(args[-1], -1, dtype=torch.int64)
    torch.library.opcheck(torch.ops.retreever.tree_attention_triton.default, (*args, choices, *shape))
    q, keys, values, mask, noise = operands(case, grad=False)
    output, path, log_prob, entropy, lse = backend._forward(q, keys, values, mask, noise, None, *shape)
    slopes = (torch.randn_like(output), torch.randn_like(log_prob), torch.randn_like(entropy))
    gradient = torch.ops.retreever.tree_attention_triton_backward.default
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(gradient, (q, keys, values, mask, path, output, lse, *slopes, *shape), test_utils=checks)


@on_device
def test_compiles_as_one_graph() -> None:
    case = Case(5, b=1, m=2, h=1, e=8, noise=True)
    q, keys, values, _, noise = operands(case)

    def loss(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output, _, log_prob, entropy = triton_search(q, keys, values, case.plan, None, noise)
        return output.square().sum() + log_prob.sum() - entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if INTERPRETING else "inductor")
    for inside, outside in zip(
        torch.autograd.grad(compiled(q, keys, values), (q, keys, values)),
        torch.autograd.grad(loss(q, keys, values), (q, keys, values)),
        strict=True,
    ):
        torch.testing.assert_close(inside, outside)


@on_device
def test_direct_launch_gives_what_the_operator_gives() -> None:
    args = operands(Case(9, b=1, m=3, h=2, e=8))
    plan = TreePlan(9)
    direct = triton_search(*(x.detach() for x in args[:3]), plan, None, None)
    through = triton_search(*args[:3], plan, None, None)
    assert not direct[0].requires_grad and through[0].requires_grad and not through[1].requires_grad
    assert all(torch.equal(x, y) for x, y in zip(direct, through, strict=True))


@cuda_only
def test_replays_as_a_cuda_graph() -> None:
    case = Case(512, b=8, m=512, noise=True)
    args = operands(case)
    slopes = [torch.randn(8, 512, 4, 16, device=DEVICE), *torch.randn(2, 8, 512, device=DEVICE)]

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in args[:3]]  # of the stream the step runs on
        output, path, log_prob, entropy = triton_search(*leaves, case.plan, *args[3:])
        return output, path, *torch.autograd.grad((output, log_prob, entropy), leaves, slopes)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for x in got:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@cuda_only
def test_more_than_two_billion_elements() -> None:
    plan = TreePlan(2**23)
    nodes = torch.empty(1, plan.nodes, 4, 64, dtype=torch.bfloat16, device=DEVICE).normal_()
    q = torch.randn(1, 64, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    noise = torch.rand(1, 64, plan.depth, device=DEVICE)
    got = triton_search(q, nodes, nodes, plan, None, noise)
    want = plain_search(q, nodes, nodes, plan, None, noise)
    same = got[1] == want[1]
    assert nodes.numel() > 2**31 and same.float().mean() > 0.9 and got[1].max() > plan.blocks // 2
    torch.testing.assert_close(got[0][same], want[0][same], rtol=2e-2, atol=2e-2)


def test_launch_choices() -> None:
    for queries, h, e, children in (
        (1, 4, 16, 2),
        (16384, 4, 16, 2),
        (10**6, 1, 8, 2),
        (512, 8, 128, 16),
        (9, 4, 16, 256),
    ):
        tile = backend.query_tile(queries.bit_length(), children, children, h, e)
        m, c, padded, heads, width = tile.shape
        assert m == tile.queries <= 16 and heads >= h and width >= e and padded >= children
        assert c == padded or (m == 1 and padded % c == 0)
        assert m * c * heads * width <= 8192 and (m == 1 or -(-queries // m) >= 1000)
    fewer, more = (backend.query_tile(queries.bit_length(), 2, 2, 1, 8).queries for queries in (64, 10**6))
    assert fewer == 1 < more


# ------------------------------------------------------------------------------------------------ compiling


@pytest.mark.skipif(INTERPRETING, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    "case",
    [
        Case(128, b=64, m=128, mask="ragged", noise=True),
        Case(300, k=256, b=1, m=300, h=3, e=60, dtype=torch.bfloat16),
        Case(128, b=1, m=4096, e=64, dtype=torch.bfloat16),  # values are read late
    ],
    ids=name,
)
def test_kernels_compile_for_hopper(case: Case, ahead_of_time: Any) -> None:
    ahead_of_time.record(backend.descend, "kernel")
    ahead_of_time.record(backward_triton, "query_gradient")
    ahead_of_time.record(backward_triton, "node_gradient")
    given = make(case)
    q = given.q.requires_grad_()
    results = triton_search(q, given.keys, given.values, case.plan, given.mask, given.noise)
    results[0].sum().backward()
    launches = ahead_of_time.launches
    assert [kernel.__name__ for kernel, _, _ in launches] == ["descend", "query_gradient", *["node_gradient"] * 2]
    for launch in launches[: 4 if case.mask else 1]:  # gradients have no such variants
        assert ahead_of_time.compile(launch) > 0
