"""What the kernels for training on a CPU compute, against torch in float64, alone and shared out among threads."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retreever.cpu import numba_here
from retreever.cpu.one_thread import one_thread
from retreever.cpu.team import row_parts, share_out
from retreever.nn import cpu_block, relu_layers
from retreever.nn.blocks import MLP, AttentionBlock
from retreever.nn.geglu import geglu

if not numba_here.numba_runs():
    pytest.skip("numba is not installed", allow_module_level=True)

sizes = st.sampled_from([1, 3, 15, 16, 17, 40, 64])


def shaken(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in module.parameters():  # norms that do nothing would hide mistakes
            weight.add_(0.2 * torch.randn_like(weight))
    return module


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=4e-6 * max(1.0, float(want.abs().max())))


def results(module: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Output and all gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = module(*leaves)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *module.parameters()], slope)]


def in_double(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module).double()
    for part in other.modules():
        part.fused = False  # type: ignore[assignment]
    return other


# ------------------------------------------------------------------------------------------------ single passes


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.sampled_from([1, 5, 64, 130]), hidden=sizes, biased=st.booleans())
def test_the_gate(rows: int, hidden: int, biased: bool) -> None:
    from retreever.cpu.geglu_kernel import gate_gradient_rows, gate_rows

    torch.manual_seed(rows * hidden)
    up, grad = 3 * torch.randn(rows, 2 * hidden), torch.randn(rows, hidden)
    bias = torch.randn(2 * hidden) if biased else None
    gated, out = torch.empty(rows, hidden), torch.empty_like(up)
    gate_rows(up, bias, gated)
    of_bias = gate_gradient_rows(grad, up, bias, out)
    true = (up.double() + (0 if bias is None else bias.double())).requires_grad_()
    value, gate = true.chunk(2, dim=-1)
    want = value * F.gelu(gate)
    (slope,) = torch.autograd.grad(want, true, grad.double())
    close(gated, want.detach())
    close(out, slope)
    close(of_bias, slope.sum(dim=0))


def test_the_gate_is_as_exact_as_torchs_everywhere() -> None:
    gate = torch.cat([torch.linspace(-15, 15, 20_001), torch.tensor([0.0, -0.0, 1e-30, -1e30, 1e30])])
    up = torch.stack([torch.ones_like(gate), gate], dim=1).requires_grad_()
    true = gate.double().requires_grad_()
    got, want = geglu(up)[:, 0], F.gelu(true)
    assert float(((got - want) / (1 + want.abs())).detach().abs().max()) < 4e-7
    got_slope, want_slope = (torch.autograd.grad(y.sum(), x)[0] for y, x in ((got, up), (want, true)))
    assert float((got_slope[:, 1] - want_slope).abs().max()) < 5e-7
    assert geglu(torch.tensor([[1.0, torch.nan]], requires_grad=True)).isnan().all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.sampled_from([1, 5, 64, 130]), width=sizes, whole=st.booleans(), double=st.booleans())
def test_sums_and_norms(rows: int, width: int, whole: bool, double: bool) -> None:
    from retreever.cpu.rows_kernel import norm_gradient_rows, sum_norm_rows, sum_rows

    torch.manual_seed(rows * width)
    dtype = torch.float64 if double else torch.float32
    x, factor, residual, slope = torch.randn(4, rows, width, dtype=dtype)
    bias, weight, shift = torch.randn(3, width, dtype=dtype)
    y = x.clone()
    normed = sum_norm_rows(y, bias if whole else None, residual if whole else None, weight, shift)
    close(y, (x + bias + residual if whole else x).double())
    true = [part.clone().double().requires_grad_() for part in (y, weight, shift)]
    want = F.layer_norm(true[0], (width,), *true[1:])
    if width > 1:
        close(normed, want.detach())
    slopes = torch.autograd.grad(want, true, slope.double())
    out = torch.empty_like(y)
    sums = norm_gradient_rows(slope, y, weight, residual if whole else None, out)
    if width > 3:  # rows of equal numbers would blow up every rounding error
        close(out, slopes[0] + (residual.double() if whole else 0))
        for got, expected in zip(sums, (*slopes[1:], out.double().sum(dim=0)), strict=True):
            close(got, expected)
    sum_rows(y, bias, factor if whole else None, residual)
    close(y, (true[0].detach() + bias).mul(factor if whole else 1).add(residual).double())


# ------------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("form", [(5, 7, 3, 2), (16, 33, 12, 4), (64, 128, 64, 3)])
def test_linear_layers_with_relu(form: tuple[int, ...], threads: int) -> None:
    torch.manual_seed(0)
    module, x = shaken(MLP(*form)), torch.randn(3, 11, form[0])
    assert relu_layers.layers_fit(x, list(module))
    for got, want in zip(results(module, [x]), results(in_double(module), [x.double()]), strict=True):
        close(got, want)


@pytest.mark.parametrize("frozen", ["input", "weights"])
def test_layers_give_the_gradients_that_are_wanted(frozen: str) -> None:
    torch.manual_seed(0)
    module, x = MLP(4, 5, 3, 2), torch.randn(7, 4, requires_grad=frozen != "input")
    module.requires_grad_(frozen != "weights")
    wanted = [part for part in (x, *module.parameters()) if part.requires_grad]
    double = in_double(module)
    true = x.detach().double().requires_grad_(x.requires_grad)
    same = [part for part in (true, *double.parameters()) if part.requires_grad]
    for again in (False, True):  # with create_graph another way is taken
        got = torch.autograd.grad(module(x).square().sum(), wanted, create_graph=again)
        want = torch.autograd.grad(double(true).square().sum(), same, create_graph=again)
        for one, other in zip(got, want, strict=True):
            close(one.detach(), other.detach())


def test_relu_lets_nan_through() -> None:
    assert MLP(2, 3, 1, 2)(torch.tensor([[1.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("residual", ["pre", "normalised", "doubled"])
def test_the_end_of_a_block(residual: str, threads: int) -> None:
    torch.manual_seed(0)
    block = shaken(AttentionBlock(24, 3, hidden=20, residual=residual))  # type: ignore[arg-type]
    inputs = [torch.randn(3, 3, 24), torch.randn(3, 5, 24)]
    assert isinstance(block, AttentionBlock) and cpu_block.block_fits(block, inputs[0])
    for got, want in zip(results(block, inputs), results(in_double(block), [x.double() for x in inputs]), strict=True):
        close(got, want)


def test_gradients_of_a_block_can_be_differentiated_again() -> None:
    torch.manual_seed(0)
    block = shaken(AttentionBlock(8, 2, hidden=6))
    found = []
    for module, x in ((block, torch.randn(2, 3, 8)), (in_double(block), torch.randn(0))):
        x = found[0][0].double() if found else x
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(leaf, leaf).square().sum(), leaf, create_graph=True)
        found.append([x, *torch.autograd.grad(slope.square().sum(), list(module.parameters()), allow_unused=True)])
    for got, want in zip(found[0][1:], found[1][1:], strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            close(got, want)


def test_dropout_hits_output_and_gradient_alike() -> None:
    torch.manual_seed(0)
    block = AttentionBlock(64, 4, hidden=64, dropout=0.5)
    attended, query = torch.zeros(64, 8, 4, 16), torch.zeros(64, 8, 64, requires_grad=True)
    nn.init.zeros_(block.to_out.bias)
    nn.init.zeros_(block.feed_forward.down.weight)  # type: ignore[union-attr]
    nn.init.ones_(block.feed_forward.down.bias)  # type: ignore[union-attr]
    out = block.finish(query, query, attended)
    assert set(out.unique().tolist()) == {0.0, 2.0} and 0.45 < float((out > 0).float().mean()) < 0.55
    (slope,) = torch.autograd.grad(out.sum(), block.feed_forward.down.bias)  # type: ignore[union-attr]
    torch.testing.assert_close(slope, out.sum(dim=(0, 1)))
    torch.manual_seed(1)
    once = block.finish(query, query, attended)
    torch.manual_seed(1)
    assert torch.equal(once, block.finish(query, query, attended))


def test_training_works_without_numba() -> None:
    code = """
import sys
sys.modules["numba"] = None
import torch
from retreever.nn.blocks import MLP, AttentionBlock
x = torch.randn(4, 9, 16, requires_grad=True)
(MLP(16, 8, 4, 3)(x).sum() + AttentionBlock(16, 2, hidden=8)(x, x).sum()).backward()
print(x.grad.isfinite().all().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "True", done.stderr


# ------------------------------------------------------------------------------------------------ threads


def test_parts_cover_all_rows(threads: int) -> None:
    for rows in (0, 1, 2, 5, 1000):
        covered = [row for part in row_parts(rows, torch.empty(0)) for row in range(rows)[part]]
        assert covered == list(range(rows))


@pytest.mark.parametrize(("policy", "parts"), [("", 1), ("active", 1), ("PASSIVE", 2), ("passive", 2)])
def test_rows_are_shared_out_only_where_torchs_threads_leave_the_cores(policy: str, parts: int) -> None:
    code = """
import torch
from retreever.cpu.team import row_parts
torch.set_num_threads(2)
print(len(row_parts(10_000, torch.empty(0))))
"""
    environment = {**os.environ, "OMP_WAIT_POLICY": policy}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == str(parts), done.stderr


def test_work_is_shared_and_errors_come_back(threads: int) -> None:
    assert share_out(lambda i: (i, torch.is_grad_enabled()), range(4)) == [(i, False) for i in range(4)]

    def fail(i: int) -> None:
        if i == 2:
            raise ValueError("number two")

    with pytest.raises(ValueError, match="number two"):
        share_out(fail, range(4))
    assert torch.get_num_threads() == threads


def test_one_thread_is_for_the_block_and_the_caller_alone() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    with one_thread(False):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before and threading.active_count() >= 1
