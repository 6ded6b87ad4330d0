"""Layer norm and attention trained by fused kernels: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.nn.fused_attention import FusedAttention, attention
from retreever.nn.layer_norm import LayerNorm

norms = pytest.importorskip("retreever.nn.layer_norm_kernel")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def gradients(output: Tensor, towards: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, towards)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    chosen = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(*parts, attn_mask=chosen).transpose(1, 2)


def assert_as_exact(found: list[Tensor], plain: list[Tensor], exact: list[Tensor], times: float = 3) -> None:
    for one, other, truth in zip(found, plain, exact, strict=True):
        band = 16 * torch.finfo(one.dtype).eps * truth.abs().max()
        assert (one.double() - truth).abs().max() <= times * (other.double() - truth).abs().max() + band


def norm_case(rows: int, d: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows + d)
    x, weight, bias, towards = 2 + 3 * torch.randn(rows, d), torch.randn(d), torch.randn(d), torch.randn(rows, d)

    def run(function: object, kind: torch.dtype) -> list[Tensor]:
        parts = [part.to(device, dtype).to(kind).requires_grad_() for part in (x, weight, bias)]
        return gradients(function(*parts), towards.to(device, dtype).to(kind), parts)  # type: ignore[operator]

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (d,), weight, bias)

    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norms.FusedLayerNorm.apply(x, weight, bias, 1e-5)

    assert_as_exact(run(fused, dtype), run(plain, dtype), run(plain, torch.float64))


def attention_case(b: int, m: int, n: int, h: int, e: int, ragged: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(m + n)
    q, kv, towards = torch.randn(b, m, h, e), torch.randn(b, n, 2, h, e), torch.randn(b, m, h, e)
    mask = None
    if ragged:
        mask = (torch.rand(b, n) < 0.7).to(device)
        mask[:, n // 2] = True

    def run(function: object, kind: torch.dtype) -> list[Tensor]:
        parts = [part.to(device, dtype).to(kind).requires_grad_() for part in (q, kv)]
        k, v = parts[1].unbind(2)
        return gradients(function(parts[0], k, v, mask), towards.to(device, dtype).to(kind), parts)  # type: ignore[operator]

    assert_as_exact(run(FusedAttention.apply, dtype), run(plain_attention, dtype), run(plain_attention, torch.float64))


@interpreted
@pytest.mark.parametrize(("rows", "d"), [(1, 1), (7, 64), (300, 48), (65, 128)])
def test_interpreted_norm_equals_torch(rows: int, d: int) -> None:
    norm_case(rows, d, torch.float32, "cpu")


@interpreted
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("b", "m", "n", "h", "e"), [(2, 5, 7, 2, 16), (1, 70, 130, 1, 12), (2, 65, 64, 1, 32)])
def test_interpreted_attention_equals_torch(b: int, m: int, n: int, h: int, e: int, ragged: bool) -> None:
    attention_case(b, m, n, h, e, ragged, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "d"), [(1, 64), (19_600, 64), (1000, 100), (33, 1024)])
def test_norm_on_a_gpu(rows: int, d: int, dtype: torch.dtype) -> None:
    norm_case(rows, d, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("b", "m", "n", "h", "e"), [(3, 5, 7, 2, 16), (2, 196, 196, 4, 16), (2, 513, 300, 2, 64), (1, 64, 64, 3, 40)]
)
def test_attention_on_a_gpu(b: int, m: int, n: int, h: int, e: int, dtype: torch.dtype, ragged: bool) -> None:
    attention_case(b, m, n, h, e, ragged, dtype, "cuda")


@pytest.mark.gpu
def test_kernels_repeat_themselves_to_the_bit() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(4, 200, 4, 16, device="cuda"), torch.randn(4, 200, 2, 4, 16, device="cuda")
    norm = LayerNorm(64).cuda()

    def once() -> list[Tensor]:
        parts = [q.clone().requires_grad_(), kv.clone().requires_grad_(), *norm.parameters()]
        out = norm(attention(parts[0], *parts[1].unbind(2)).flatten(2))
        return gradients(out, torch.ones_like(out), parts)

    first = once()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_on_a_cpu_they_are_torchs_own() -> None:
    norm, x = LayerNorm(8), torch.randn(3, 8)
    assert torch.equal(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias))
    q, k, v = torch.randn(3, 2, 5, 2, 8).unbind()
    assert torch.allclose(attention(q, k, v), plain_attention(q, k, v, None))
