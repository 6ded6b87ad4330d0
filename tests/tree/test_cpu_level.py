"""The tree on a CPU: families by kernels against torch in float64, and trees shared out among threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retreever.cpu.numba_here import numba_runs
from retreever.tree import siblings
from retreever.tree.aggregate import TransformerAggregator, make_aggregator
from retreever.tree.build import build_nodes

if not numba_runs():
    pytest.skip("numba is not installed", allow_module_level=True)


def family(g: int, k: int, h: int, e: int, dropped: bool, hidden: bool) -> tuple[Any, ...]:
    torch.manual_seed(g * k * h * e)
    factor = torch.rand(g, k, k, h).mul(2).floor() * 2 if dropped else None
    mask = torch.rand(g, 1, k, 1) < 0.3
    mask[:, :, 0] = False
    return (
        torch.randn(g, k, 3, h, e),
        torch.empty(g, k, k, h),
        factor,
        mask if hidden else None,
        torch.empty(g * k, h * e),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    g=st.sampled_from([1, 7, 33, 70]),
    k=st.integers(1, 4),
    h=st.sampled_from([1, 2, 4, 17]),
    e=st.sampled_from([1, 5, 16, 20]),
    dropped=st.booleans(),
    hidden=st.booleans(),
)
def test_families_are_those_of_plain_torch(g: int, k: int, h: int, e: int, dropped: bool, hidden: bool) -> None:
    """In float32 by kernels, in float64 by torch."""
    given_ = family(g, k, h, e, dropped, hidden)
    double = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given_)
    for each in (given_, double):
        siblings.attend(*each)
    grad = torch.randn(g * k, h * e)
    slopes = []
    for each, slope in ((given_, grad), (double, grad.double())):
        siblings.attend_backward(*each[:3], slope, out := torch.full_like(each[0], torch.nan))
        slopes.append(out)
    for got, want in ((given_[1], double[1]), (given_[4], double[4]), tuple(slopes)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


def test_kernels_work_in_double_precision_too() -> None:
    from retreever.cpu.siblings_kernel import attend_families, attend_families_gradient

    qkv, shares, factor, hidden, out = (
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in family(9, 3, 2, 5, True, True)
    )
    siblings.attend(qkv, shares, factor, hidden, out)
    attend_families(qkv, again := torch.empty_like(shares), factor, hidden, read := torch.empty_like(out))
    torch.testing.assert_close((again, read), (shares, out), rtol=1e-13, atol=1e-13)
    siblings.attend_backward(qkv, shares, factor, out, want := torch.empty_like(qkv))
    attend_families_gradient(qkv, shares, factor, out, got := torch.empty_like(qkv))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def results(module: nn.Module, context: Tensor, branch: int, mask: Tensor | None, detach: bool) -> list[Tensor]:
    leaf = context.clone().requires_grad_()
    _, nodes, _ = build_nodes(leaf, module, branch, mask, detach)
    slope = torch.randn(nodes.shape, generator=torch.Generator().manual_seed(1)).to(nodes)
    return [nodes.detach(), *torch.autograd.grad(nodes, [leaf, *module.parameters()], slope)]


@pytest.mark.parametrize("residual", ["pre", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("masked", "detach", "branch"), [(False, False, 2), (True, False, 3), (True, True, 4)])
def test_shared_trees_are_those_of_plain_torch(
    residual: Any, dtype: torch.dtype, masked: bool, detach: bool, branch: int, threads: int
) -> None:
    torch.manual_seed(0)
    module = make_aggregator("transformer", 24, 3, 20, residual, 0.0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    plain = copy.deepcopy(module).double()
    assert isinstance(plain, TransformerAggregator)
    plain.fused = plain.layer.feed_forward.fused = False  # type: ignore[union-attr]
    context = torch.randn(5, 29, 24)
    mask = torch.arange(29) < torch.tensor([29, 3, 1, 17, 8])[:, None] if masked else None
    got = results(module.to(dtype), context.to(dtype), branch, mask, detach)
    want = results(plain, context.double(), branch, mask, detach)
    again = results(module, context.to(dtype), branch, mask, detach)
    for one, other, same in zip(got, want, again, strict=True):
        assert torch.equal(one, same)
        precision = 2e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one.double(), other, rtol=precision, atol=precision * float(other.abs().max() + 1))


def test_dropout_is_drawn_in_the_same_order_in_every_run(threads: int) -> None:
    module, context = make_aggregator("transformer", 16, 2, 8, "pre", 0.3), torch.randn(6, 16, 16)
    found = []
    for _ in range(3):
        torch.manual_seed(7)
        found.append(results(module, context, 2, None, False))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
