"""All levels in one differentiable step: the same nodes and gradients as level by level, in float64 and float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import retreever.nn.blocks as blocks
import retreever.tree.ascent as ascent
import retreever.tree.level as level
from retreever.nn.blocks import FEW
from retreever.nn.dropout import keep
from retreever.tree.aggregate import TransformerAggregator, make_aggregator
from retreever.tree.build import build_nodes, plan_for
from retreever.tree.plan import TreePlan

DIM = 8
FORMS = ("pre", "normalised")
each_form = pytest.mark.parametrize("residual", FORMS)


def aggregator(dropout: float = 0.0, dtype: torch.dtype = torch.float64, residual: str = "pre") -> nn.Module:
    torch.manual_seed(0)
    module = make_aggregator("transformer", DIM, 2, 6, residual, dropout).to(dtype)
    with torch.no_grad():
        for weight in module.parameters():  # norms that do nothing would hide mistakes
            weight.add_(0.3 * torch.randn_like(weight))
    return module


def level_by_level(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    assert isinstance(other, TransformerAggregator)
    other.fused = other.layer.feed_forward.fused = False
    return other


def nodes_and_gradients(
    module: nn.Module, context: Tensor, branch: int, mask: Tensor | None, detach: bool = False
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    context = context.clone().requires_grad_()
    _, nodes, node_mask = build_nodes(context, module, branch, mask, detach)
    weights = torch.randn(nodes.shape, dtype=nodes.dtype, generator=torch.Generator().manual_seed(1)).to(nodes.device)
    slopes = torch.autograd.grad((nodes * weights).sum(), [context, *module.parameters()], materialize_grads=True)
    return nodes.detach(), node_mask, list(slopes)


def assert_same(got: Tensor, want: Tensor) -> None:
    """To the last digits of float64; gradients of weights are sums over all nodes."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=2e-14 * max(1.0, float(want.abs().max())))


@given(
    residual=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    branch=st.integers(2, 4),
    masked=st.booleans(),
    detach=st.booleans(),
)
@settings(max_examples=120, derandomize=True, deadline=None)
def test_the_same_as_level_by_level(residual: str, lengths: list[int], branch: int, masked: bool, detach: bool) -> None:
    n, module = max(lengths), aggregator(residual=residual)
    context = torch.randn(len(lengths), n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    mask = torch.arange(n) < torch.tensor(lengths)[:, None] if masked else None
    got = nodes_and_gradients(module, context, branch, mask, detach)
    want = nodes_and_gradients(level_by_level(module), context, branch, mask, detach)
    assert_same(got[0], want[0])
    assert got[1] is None if want[1] is None else torch.equal(got[1], want[1])
    for slope, true in zip(got[2], want[2], strict=True):
        assert_same(slope, true)
    again = nodes_and_gradients(module, context, branch, mask, detach)
    assert all(map(torch.equal, (got[0], *got[2]), (again[0], *again[2])))


@each_form
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_as_level_by_level_with_the_same_dropout(
    residual: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's way is handed the very factors, level by level: first those of the attention, then the others."""
    module, context = aggregator(0.4, residual=residual).train(), torch.randn(3, 13, DIM, dtype=torch.float64)
    mask = torch.arange(13) < torch.tensor([13, 1, 6])[:, None] if masked else None
    drawn: list[Tensor] = []
    monkeypatch.setattr(level, "keep", lambda *args: drawn.append(keep(*args)) or drawn[-1])
    got = nodes_and_gradients(module, context, 2, mask)
    shares, fed = drawn
    plan = plan_for(13, 2, mask)
    levels = ascent.levels_of(plan, context, None)
    factors = [factor for level in levels for factor in (shares[level.cells], fed[level.rows])]
    monkeypatch.setattr(blocks, "drop", lambda x, p: x * factors.pop(0).view(x.shape))
    monkeypatch.setattr(blocks.Dropout, "forward", lambda self, x: blocks.drop(x, self.p))
    want = nodes_and_gradients(level_by_level(module), context, 2, mask)
    assert not factors
    for ours, torchs in zip((got[0], *got[2]), (want[0], *want[2]), strict=True):
        assert_same(ours, torchs)


@each_form
def test_float32_is_as_exact_as_level_by_level(residual: str) -> None:
    single, double = aggregator(dtype=torch.float32, residual=residual), aggregator(residual=residual)
    context = torch.randn(4, 64, DIM, generator=torch.Generator().manual_seed(0))
    want = nodes_and_gradients(level_by_level(double), context.double(), 2, None)[2]
    for_torch = nodes_and_gradients(level_by_level(single), context, 2, None)[2]
    for got, torchs, true in zip(nodes_and_gradients(single, context, 2, None)[2], for_torch, want, strict=True):
        bound = 3 * float((torchs - true).abs().max()) + 1e-6 * float(true.abs().max())
        assert float((got - true).abs().max()) <= bound


def test_it_is_the_way_of_training_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = level.level_up
    monkeypatch.setattr(level, "level_up", lambda *args: calls.append(1) or inner(*args))
    context = torch.randn(1, 9, DIM, dtype=torch.float64)

    def levels(module: nn.Module, branch: int = 2) -> int:
        calls.clear()
        build_nodes(context, module, branch)
        return len(calls)

    assert levels(aggregator()) == TreePlan(9, 2).depth == 3
    assert levels(level_by_level(aggregator())) == 0
    assert levels(aggregator(residual="normalised")) == 3
    assert levels(aggregator(residual="doubled")) == 0
    assert levels(aggregator().eval()) == 0
    wide = int(FEW**0.5) + 1
    assert TreePlan(9, wide).depth and levels(aggregator(), wide) == 0
    with torch.no_grad():
        assert levels(aggregator()) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert levels(aggregator(dtype=torch.float32).double()) == 0
    for name in ("CPU_ROWS", "KERNEL_ROWS"):
        monkeypatch.setattr(ascent, name, TreePlan(9, 2).nodes - 1)
    assert levels(aggregator()) == 0


@each_form
def test_dropout_is_drawn_for_attention_and_feed_forward(residual: str) -> None:
    """The gradient belongs to the draw: checked by differences, with the seed set before every call."""
    module = aggregator(dropout=0.4, residual=residual).train()
    context = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)

    def nodes(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return build_nodes(x, module, 2)[1]

    assert torch.autograd.gradcheck(nodes, (context,))
    first = nodes(context)
    assert torch.equal(first, nodes(context))
    torch.manual_seed(4)
    assert not torch.equal(first, build_nodes(context, module, 2)[1])
    module.eval()
    assert torch.equal(build_nodes(context, module, 2)[1], build_nodes(context, module, 2)[1])


@each_form
def test_means_over_many_draws_of_dropout_agree_with_torch(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear in the dropped feed-forward output, so its mean is that without dropout there."""
    for name in ("CPU_ROWS", "KERNEL_ROWS"):
        monkeypatch.setattr(ascent, name, 1 << 20)
    module = aggregator(dropout=0.3, residual=residual).train()
    context = torch.randn(1, 4, DIM, dtype=torch.float64).expand(4000, -1, -1).contiguous().requires_grad_()
    torch.manual_seed(0)
    ours, torchs = (build_nodes(context, m, 2)[1].detach().mean(dim=0) for m in (module, level_by_level(module)))
    assert float((ours - torchs).abs().max()) < 0.1


@each_form
def test_a_graph_may_be_walked_twice_and_frozen_weights_stay_so(residual: str) -> None:
    module = aggregator(residual=residual)
    context = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    nodes = build_nodes(context, module, 2)[1]
    slopes = [torch.autograd.grad(nodes.square().sum(), context, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*slopes)
    frozen = aggregator(residual=residual).requires_grad_(False)
    build_nodes(context, frozen, 2)[1].square().sum().backward()
    torch.testing.assert_close(context.grad, slopes[0])
    assert all(weight.grad is None for weight in frozen.parameters())


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for a GPU: values read back or sent, sizes that depend on data."""

    WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_assert_async", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in self.WAITING), func
        return func(*args, **(kwargs or {}))


@each_form
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_in_it_waits_for_the_device(residual: str, masked: bool) -> None:
    """So that a CUDA graph can hold it."""
    module, leaves = aggregator(0.1, residual=residual).train(), torch.randn(2, 8, DIM, dtype=torch.float64)
    real = torch.arange(8) < torch.tensor([8, 3])[:, None]
    masks = [real, real.view(2, 4, 2).any(dim=2), real.view(2, 2, 4).any(dim=2)] if masked else None
    with NoWaiting():
        ascent.ascend(module.layer, TreePlan(8), leaves, masks, False).sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_form
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu(residual: str, masked: bool) -> None:
    module, context = aggregator(residual=residual), torch.randn(3, 37, DIM, dtype=torch.float64)
    mask = torch.arange(37) < torch.tensor([37, 1, 20])[:, None] if masked else None
    want = nodes_and_gradients(module, context, 2, mask)
    got = nodes_and_gradients(module.cuda(), context.cuda(), 2, None if mask is None else mask.cuda())
    torch.testing.assert_close(got[0].cpu(), want[0])
    for slope, true in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(slope.cpu(), true)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_form
def test_a_cuda_graph_holds_it(residual: str) -> None:
    module = aggregator(residual=residual).cuda()
    leaves = torch.randn(2, 8, DIM, dtype=torch.float64, device="cuda", requires_grad=True)
    real = torch.arange(8, device="cuda") < torch.arange(3, 9, 5, device="cuda")[:, None]
    masks = [real, real.view(2, 4, 2).any(dim=2), real.view(2, 2, 4).any(dim=2)]

    def slopes() -> tuple[Tensor, ...]:
        nodes = ascent.ascend(module.layer, TreePlan(8), leaves, masks, False)
        return torch.autograd.grad(nodes.square().sum(), [leaves, *module.parameters()])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = slopes()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = slopes()
    graph.replay()
    for slope, true in zip(got, want, strict=True):
        torch.testing.assert_close(slope, true)
