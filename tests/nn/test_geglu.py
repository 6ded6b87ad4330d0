"""The gate of GEGLU against torch's autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.nn.blocks import FeedForward
from retreever.nn.geglu import geglu


def plain(up: Tensor) -> Tensor:
    value, gate = up.chunk(2, dim=-1)
    return value * F.gelu(gate)


@pytest.mark.parametrize("shape", [(2,), (5, 8), (3, 4, 6), (0, 4)])
def test_value_and_gradient_are_those_of_plain_torch(shape: tuple[int, ...]) -> None:
    up = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.equal(geglu(up), plain(up))
    slope = torch.randn_like(geglu(up))
    got, want = (torch.autograd.grad(f(up), up, slope)[0] for f in (geglu, plain))
    torch.testing.assert_close(got, want)


def test_gradients_may_be_strided_and_differentiated_again() -> None:
    up = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    strided = up.transpose(0, 1)
    assert torch.autograd.gradcheck(geglu, (strided,)) and torch.autograd.gradgradcheck(geglu, (up,))


def test_the_feed_forward_is_the_same_either_way() -> None:
    torch.manual_seed(0)
    fused = FeedForward(6, 5).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for fused.fused in (True, False):
        found.append(torch.autograd.grad(fused(x).square().sum(), [x, *fused.parameters()]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_torchs_function_transforms_take_it_in_training_mode() -> None:
    up = torch.randn(5, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(geglu(up).square().sum(), up)
    assert torch.allclose(torch.func.grad(lambda x: geglu(x).square().sum())(up.detach()), wanted, atol=1e-6)
