"""All levels by fused kernels: in Triton's interpreter, and on a GPU, the same as level by level."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from retreever.nn import fused_block
from retreever.tree import ascent
from retreever.tree.aggregate import TransformerAggregator, make_aggregator
from retreever.tree.build import build_nodes

fused = pytest.importorskip("retreever.tree.fused_level")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
each_form = pytest.mark.parametrize("residual", ["pre", "normalised"])
DIM = 16


def aggregator(residual: str, dropout: float = 0.0, dim: int = DIM) -> TransformerAggregator:
    torch.manual_seed(0)
    module = make_aggregator("transformer", dim, dim // 8, 32, residual, dropout)
    with torch.no_grad():
        for weight in module.parameters():  # norms that do nothing would hide mistakes
            weight.add_(0.2 * torch.randn_like(weight))
    assert isinstance(module, TransformerAggregator)
    return module


def nodes_and_gradients(
    module: nn.Module, context: Tensor, branch: int, mask: Tensor | None, detach: bool
) -> list[Tensor]:
    context = context.clone().requires_grad_()
    _, nodes, _ = build_nodes(context, module, branch, mask, detach)
    weights = torch.randn(nodes.shape, generator=torch.Generator().manual_seed(1)).to(nodes)
    slopes = torch.autograd.grad((nodes * weights).sum(), [context, *module.parameters()], materialize_grads=True)
    return [nodes.detach(), *slopes]


def case(
    residual: str, lengths: list[int], branch: int, masked: bool, detach: bool, device: str, dim: int = DIM
) -> None:
    n, module = max(lengths), aggregator(residual, dim=dim).to(device)
    context = torch.randn(len(lengths), n, dim, generator=torch.Generator().manual_seed(n)).to(device)
    mask = (torch.arange(n) < torch.tensor(lengths)[:, None]).to(device) if masked else None
    got = nodes_and_gradients(module, context, branch, mask, detach)
    slow = copy.deepcopy(module)
    slow.fused = slow.layer.feed_forward.fused = slow.layer.fused = False
    plain = nodes_and_gradients(slow, context, branch, mask, detach)
    exact = nodes_and_gradients(slow.double(), context.double(), branch, mask, detach)
    for one, other, truth in zip(got, plain, exact, strict=True):
        band = 64 * torch.finfo(torch.float32).eps * truth.abs().max()
        assert (one.double() - truth).abs().max() <= 3 * (other.double() - truth).abs().max() + band


@interpreted
@each_form
@pytest.mark.parametrize(
    ("lengths", "branch", "masked", "detach"),
    [([8], 2, False, False), ([7, 3], 2, True, False), ([64], 4, False, False), ([5, 16, 1], 4, True, True)],
)
def test_interpreted_levels_equal_torch(
    residual: str, lengths: list[int], branch: int, masked: bool, detach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(
        ascent.fused_block, "fits", lambda block, x: taken.append(block.fused) or (block.fused and not x.is_cuda)
    )
    monkeypatch.setattr("retreever.nn.blocks.fits", lambda block, x: False)
    case(residual, lengths, branch, masked, detach, "cpu")
    assert taken[0]


@interpreted
@each_form
def test_interpreted_dropout_has_the_gradient_of_its_draw(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways get the same factors, drawn for all levels at once."""
    module, context = aggregator(residual, 0.4), torch.randn(2, 6, DIM)
    monkeypatch.setattr("retreever.nn.blocks.fits", lambda block, x: False)
    found = []
    for one in (True, False):
        monkeypatch.setattr(ascent.fused_block, "fits", lambda block, x, one=one: one)
        torch.manual_seed(3)
        found.append(nodes_and_gradients(module, context, 2, None, False))
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, atol=1e-4 * max(1.0, float(plain.abs().max())))


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    ("lengths", "branch", "masked", "detach"),
    [
        ([46, 3, 17] * 20, 2, True, False),
        ([128] * 64, 2, False, False),
        ([33, 64], 4, True, True),
        ([1000], 2, False, False),
    ],
)
def test_levels_on_a_gpu(
    residual: str, lengths: list[int], branch: int, masked: bool, detach: bool, precision: str
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert fused_block.fits(aggregator(residual, dim=64).cuda().layer, torch.randn(1, 1, 64, device="cuda"))
        case(residual, lengths, branch, masked, detach, "cuda", dim=64)
    finally:
        torch.set_float32_matmul_precision(before)
