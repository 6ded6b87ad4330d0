"""A transformer layer trained by fused kernels: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever.nn import fused_block
from retreever.nn.blocks import AttentionBlock, Residual, self_attention_block

weights = pytest.importorskip("retreever.nn.weight_kernel")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
forms = pytest.mark.parametrize("residual", ["pre", "normalised"])
Step = Callable[[AttentionBlock, Tensor], Tensor]


def fused_step(block: AttentionBlock, x: Tensor) -> Tensor:
    normed, q, keys, values = fused_block.project_fused(block, x)
    return fused_block.finish_fused(
        block, x if block.residual == "pre" else normed, block.attend(q, keys, values, None)
    )


def plain_step(block: AttentionBlock, x: Tensor) -> Tensor:
    block.fused = False
    return block(x, x)


def a_block(dim: int, heads: int, hidden: int, residual: Residual, dropout: float = 0.0) -> AttentionBlock:
    torch.manual_seed(dim + hidden)
    block = self_attention_block(dim, heads, hidden, residual, dropout)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def results(block: AttentionBlock, step: Step, x: Tensor, towards: Tensor) -> list[Tensor]:
    """The output, and gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = step(block, x)
    return [out.detach(), *torch.autograd.grad(out, [x, *block.parameters()], towards)]


def case(rows: tuple[int, int], dim: int, heads: int, hidden: int, residual: Residual, device: str, step: Step) -> None:
    """Errors against float64 at most three times those of torch's own operations."""
    block = a_block(dim, heads, hidden, residual).to(device)
    x, towards = (torch.randn(*rows, dim, device=device) for _ in range(2))
    found, plain = (results(block, one, x, towards) for one in (step, plain_step))
    exact = results(block.double(), plain_step, x.double(), towards.double())
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.shape == truth.shape
        band = 32 * torch.finfo(torch.float32).eps * truth.abs().max()
        assert (one.double() - truth).abs().max() <= 3 * (other.double() - truth).abs().max() + band


@interpreted
@forms
@pytest.mark.parametrize(
    ("rows", "dim", "heads", "hidden"), [((1, 1), 16, 1, 32), ((2, 35), 32, 2, 96), ((1, 70), 64, 4, 128)]
)
def test_an_interpreted_layer_equals_torch(
    rows: tuple[int, int], dim: int, heads: int, hidden: int, residual: Residual
) -> None:
    case(rows, dim, heads, hidden, residual, "cpu", fused_step)


@interpreted
@pytest.mark.parametrize("count", [1, 64, 129, 9000])
def test_interpreted_weight_gradients_are_those_of_the_products(count: int) -> None:
    torch.manual_seed(count)
    layers = [(torch.randn(count, out), torch.randn(count, into), bias) for out, into, bias in WEIGHTS]
    norm = torch.randn(count % 70 + 1, 2, 16)
    found = iter(weights.weight_gradients(layers, norm))
    for slope, source, bias in layers:
        assert torch.allclose(next(found), slope.t() @ source, atol=1e-3, rtol=1e-4)
        assert not bias or torch.allclose(next(found), slope.sum(dim=0), atol=1e-3, rtol=1e-4)
    assert torch.allclose(next(found), norm.sum(dim=0), atol=1e-5)
    assert next(found, None) is None
    assert len(weights.weight_gradients(layers[:1])) == 2


WEIGHTS = [(64, 16, True), (32, 96, False), (192, 128, True)]


@interpreted
@forms
def test_dropout_hits_the_feed_forward_block_alone(residual: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything dropped the feed-forward block adds nothing and its weights have no gradient."""
    block = a_block(16, 1, 32, residual, dropout=0.5)
    x = torch.randn(2, 3, 16)
    monkeypatch.setattr(fused_block, "keep", lambda shape, p, like: like.new_zeros(shape))
    attended = torch.randn(2, 3, 1, 16)
    out = fused_block.finish_fused(block, x, attended)
    added = x + block.to_out(attended.flatten(-2))
    assert torch.allclose(out, added if residual == "pre" else block.feed_norm(added), atol=1e-5)
    feed: Any = block.feed_forward
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), list(feed.parameters()), retain_graph=True))
    assert torch.autograd.grad(out.square().sum(), block.to_out.weight)[0].any()


@interpreted
def test_second_derivatives_are_refused() -> None:
    block, x = a_block(16, 1, 32, "pre"), torch.randn(1, 2, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(fused_step(block, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_what_the_kernels_cannot_do_is_left_to_torch() -> None:
    """On a CPU, without a gradient, in other precisions: `fits` says no, and the block does as ever."""
    block, x = a_block(16, 1, 32, "pre"), torch.randn(1, 2, 16)
    assert not fused_block.fits(block, x)
    assert torch.equal(block(x, x), plain_step(block, x))


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    ("rows", "dim", "heads", "hidden"),
    [((1, 3), 16, 1, 32), ((100, 196), 64, 4, 128), ((3, 50), 128, 4, 256)],
)
def test_a_layer_on_a_gpu(
    rows: tuple[int, int], dim: int, heads: int, hidden: int, residual: Residual, precision: str
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        case(rows, dim, heads, hidden, residual, "cuda", lambda block, x: taken(block, x)(x, x))
    finally:
        torch.set_float32_matmul_precision(before)


def taken(block: AttentionBlock, x: Tensor) -> AttentionBlock:
    block.fused = True
    assert fused_block.fits(block, x)
    return block


@pytest.mark.gpu
def test_a_layer_repeats_its_gradients_to_the_bit() -> None:
    block = a_block(64, 4, 128, "normalised").cuda()
    x, towards = (torch.randn(64, 46, 64, device="cuda") for _ in range(2))
    first = results(block, lambda block, x: block(x, x), x, towards)
    for _ in range(20):
        again = results(block, lambda block, x: block(x, x), x, towards)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
