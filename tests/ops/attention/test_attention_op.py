"""Attention over all tokens: the Triton kernel in its interpreter and on a GPU, plain torch everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.errors import BackendError
from retreever.ops.attention.api import attention

launch = pytest.importorskip("retreever.ops.attention.launch_triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def gradients(output: Tensor, towards: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, towards)]


def torchs_own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    shown = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(*parts, attn_mask=shown).transpose(1, 2)


def assert_as_exact(found: list[Tensor], plain: list[Tensor], exact: list[Tensor], times: float = 3) -> None:
    for one, other, truth in zip(found, plain, exact, strict=True):
        band = 16 * torch.finfo(one.dtype).eps * truth.abs().max()
        assert (one.double() - truth).abs().max() <= times * (other.double() - truth).abs().max() + band


def case(b: int, m: int, n: int, h: int, e: int, ragged: bool, dtype: torch.dtype, device: str) -> None:
    """Values and gradients err no more than three times as much as torch's in the same dtype, against float64."""
    torch.manual_seed(m + n)
    q, kv, towards = torch.randn(b, m, h, e), torch.randn(b, n, 2, h, e), torch.randn(b, m, h, e)
    mask = None
    if ragged:
        wide = (torch.rand(b, n + 3) < 0.7).to(device)
        mask = wide[:, 3:]  # a view with a stride of its own
        mask[:, n // 2] = True

    def run(function: object, kind: torch.dtype) -> list[Tensor]:
        parts = [part.to(device, dtype).to(kind).requires_grad_() for part in (q, kv)]
        k, v = parts[1].unbind(2)
        return gradients(function(parts[0], k, v, mask), towards.to(device, dtype).to(kind), parts)  # type: ignore[operator]

    assert_as_exact(run(launch.attention_triton, dtype), run(torchs_own, dtype), run(torchs_own, torch.float64))


@interpreted
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("b", "m", "n", "h", "e"), [(2, 5, 7, 2, 16), (1, 70, 130, 1, 12), (2, 65, 64, 1, 32)])
def test_interpreted_kernel_equals_torch(b: int, m: int, n: int, h: int, e: int, ragged: bool) -> None:
    case(b, m, n, h, e, ragged, torch.float32, "cpu")


@interpreted
def test_opcheck() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 5, 1, 16).unbind())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(launch._forward, (q, k, v, None), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("b", "m", "n", "h", "e"), [(3, 5, 7, 2, 16), (2, 196, 196, 4, 16), (2, 513, 300, 2, 64), (1, 64, 64, 3, 40)]
)
def test_kernel_on_a_gpu(b: int, m: int, n: int, h: int, e: int, dtype: torch.dtype, ragged: bool) -> None:
    case(b, m, n, h, e, ragged, dtype, "cuda")


@pytest.mark.gpu
def test_the_kernel_repeats_itself_to_the_bit() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(4, 200, 4, 16, device="cuda"), torch.randn(4, 200, 2, 4, 16, device="cuda")

    def once() -> list[Tensor]:
        parts = [q.clone().requires_grad_(), kv.clone().requires_grad_()]
        out = attention(parts[0], *parts[1].unbind(2))
        return gradients(out, torch.ones_like(out), parts)

    first = once()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize(("m", "n"), [(2, 3), (5, 7), (1, 1)])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("masked", [False, True])
def test_plain_ways_are_attention(m: int, n: int, impl: str, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, m, 2, 8), torch.randn(2, n, 2, 8), torch.randn(2, n, 2, 8)
    mask = torch.rand(2, n) < 0.5 if masked else None
    if mask is not None:
        mask[:, 0] = True
    torch.testing.assert_close(attention(q, k, v, mask, impl=impl), torchs_own(q, k, v, mask))


def test_the_reference_has_second_derivatives_and_takes_transforms() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 2, 8, dtype=torch.float64).unbind()

    def total(q: Tensor) -> Tensor:
        return attention(q, k, v, impl="reference").square().sum()

    assert torch.autograd.gradgradcheck(total, (q.clone().requires_grad_(),))
    one_by_one = torch.stack([total(row[None].expand(2, -1, -1, -1)) for row in q])
    mapped = torch.func.vmap(lambda row: total(row[None].expand(2, -1, -1, -1)))(q)
    torch.testing.assert_close(mapped, one_by_one)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 5, 1, 4).unbind()
    exact = attention(q, k, v)
    for impl in ("auto", "reference"):
        drawn = torch.stack([attention(q, k, v, dropout=0.3, impl=impl) for _ in range(4000)])
        assert not torch.equal(drawn[0], drawn[1])
        torch.testing.assert_close(drawn.mean(dim=0), exact, atol=0.05, rtol=0)


@interpreted
def test_a_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("retreever.ops.backend._chosen", {})
    q = torch.randn(1, 5, 1, 8)
    with pytest.raises(BackendError, match="impl='triton' cannot run here: triton needs CUDA tensors, got cpu"):
        attention(q, q, q, impl="triton")
