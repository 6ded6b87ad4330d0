"""All levels in one differentiable step: the same nodes and gradients as level by level, in float64 and float32."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import retreever.tree.ascent as ascent
from retreever.nn.blocks import FEW
from retreever.tree.aggregate import TransformerAggregator, make_aggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan

DIM = 8


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


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    branch=st.integers(2, 4),
    masked=st.booleans(),
    detach=st.booleans(),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_the_same_as_level_by_level(lengths: list[int], branch: int, masked: bool, detach: bool) -> None:
    n, module = max(lengths), aggregator()
    context = torch.randn(len(lengths), n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    mask = torch.arange(n) < torch.tensor(lengths)[:, None] if masked else None
    got = nodes_and_gradients(module, context, branch, mask, detach)
    want = nodes_and_gradients(level_by_level(module), context, branch, mask, detach)
    torch.testing.assert_close(got[0], want[0])
    assert got[1] is None if want[1] is None else torch.equal(got[1], want[1])
    for slope, true in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(slope, true)


def test_float32_is_as_exact_as_level_by_level() -> None:
    single, double = aggregator(dtype=torch.float32), aggregator()
    context = torch.randn(4, 64, DIM, generator=torch.Generator().manual_seed(0))
    want = nodes_and_gradients(level_by_level(double), context.double(), 2, None)[2]
    for_torch = nodes_and_gradients(level_by_level(single), context, 2, None)[2]
    for got, torchs, true in zip(nodes_and_gradients(single, context, 2, None)[2], for_torch, want, strict=True):
        bound = 3 * float((torchs - true).abs().max()) + 1e-6 * float(true.abs().max())
        assert float((got - true).abs().max()) <= bound


def test_it_is_the_way_of_training_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = ascent._level_up
    monkeypatch.setattr(ascent, "_level_up", lambda *args: calls.append(1) or inner(*args))
    context = torch.randn(1, 9, DIM, dtype=torch.float64)

    def levels(module: nn.Module, branch: int = 2) -> int:
        calls.clear()
        build_nodes(context, module, branch)
        return len(calls)

    assert levels(aggregator()) == TreePlan(9, 2).depth == 3
    assert levels(level_by_level(aggregator())) == 0
    assert levels(aggregator(residual="normalised")) == 0
    wide = int(FEW**0.5) + 1
    assert TreePlan(9, wide).depth and levels(aggregator(), wide) == 0
    with torch.no_grad():
        assert levels(aggregator()) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert levels(aggregator(dtype=torch.float32).double()) == 0


def test_dropout_is_drawn_for_attention_and_feed_forward() -> None:
    """The gradient belongs to the draw: checked by differences, with the seed set before every call."""
    module = aggregator(dropout=0.4).train()
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


def test_means_over_many_draws_of_dropout_agree_with_torch() -> None:
    """Linear in the dropped feed-forward output, so its mean is that without dropout there."""
    module = aggregator(dropout=0.3).train()
    context = torch.randn(1, 4, DIM, dtype=torch.float64).expand(4000, -1, -1).contiguous().requires_grad_()
    torch.manual_seed(0)
    ours, torchs = (build_nodes(context, m, 2)[1].detach().mean(dim=0) for m in (module, level_by_level(module)))
    assert float((ours - torchs).abs().max()) < 0.1


def test_a_graph_may_be_walked_twice_and_frozen_weights_stay_so() -> None:
    module = aggregator()
    context = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    nodes = build_nodes(context, module, 2)[1]
    slopes = [torch.autograd.grad(nodes.square().sum(), context, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*slopes)
    frozen = aggregator().requires_grad_(False)
    build_nodes(context, frozen, 2)[1].square().sum().backward()
    torch.testing.assert_close(context.grad, slopes[0])
    assert all(weight.grad is None for weight in frozen.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu(masked: bool) -> None:
    module, context = aggregator(), torch.randn(3, 37, DIM, dtype=torch.float64)
    mask = torch.arange(37) < torch.tensor([37, 1, 20])[:, None] if masked else None
    want = nodes_and_gradients(module, context, 2, mask)
    got = nodes_and_gradients(module.cuda(), context.cuda(), 2, None if mask is None else mask.cuda())
    torch.testing.assert_close(got[0].cpu(), want[0])
    for slope, true in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(slope.cpu(), true)
