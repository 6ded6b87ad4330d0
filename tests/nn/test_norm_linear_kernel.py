"""Norm and linear layer in one kernel: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from retreever.nn.blocks import norm_linear

kernel = pytest.importorskip("retreever.nn.norm_linear_kernel")


def layers(bias: bool) -> tuple[torch.nn.LayerNorm, torch.nn.Linear]:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm, torch.nn.Linear(64, 128, bias=bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("bias", [False, True])
def test_interpreted_kernel_equals_plain_layers(bias: bool) -> None:
    norm, linear = layers(bias)
    x = 3 + 5 * torch.randn(3, 50, 64)
    with torch.inference_mode():
        assert kernel.fits(x, linear)
        assert torch.allclose(kernel.norm_linear_fused(x, norm, linear), linear(norm(x)), atol=1e-5)


def test_sizes_the_kernel_cannot_do_are_left_to_plain_torch() -> None:
    assert not kernel.fits(torch.zeros(2, 48), torch.nn.Linear(48, 64))
    assert not kernel.fits(torch.zeros(2, 64), torch.nn.Linear(64, 65))
    assert not kernel.fits(torch.zeros(64, 2).T, torch.nn.Linear(64, 64))
    assert not kernel.fits(torch.zeros(2, 64).double(), torch.nn.Linear(64, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layer_is_as_exact_as_plain_layers(dtype: torch.dtype) -> None:
    norm, linear = (layer.to("cuda", dtype) for layer in layers(bias=False))
    x = torch.randn(3, 1000, 64, device="cuda", dtype=dtype)
    with torch.inference_mode():
        fused, plain = norm_linear(x, norm, linear), linear(norm(x))
        exact = linear.double()(norm.double()(x.double()))
    band = 8 * torch.finfo(dtype).eps * exact.abs().max()
    assert (fused - exact).abs().max() <= 2 * (plain - exact).abs().max() + band
