"""Dropout: torch's own in what it means, drawn faster on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from retreever.nn.dropout import STEPS, Dropout, drop, keep


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / STEPS, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_element_is_dropped_with_the_probability_stated(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1003, dtype=dtype)  # not a multiple of four elements
    y = drop(x, p)
    exact = round(p * STEPS) / STEPS
    dropped = y == 0
    error = (exact * (1 - exact) / x.numel()) ** 0.5
    assert abs(float(dropped.double().mean()) - exact) < 5 * error
    assert y[~dropped].unique().tolist() == pytest.approx([1 / (1 - exact)])
    assert abs(exact - p) <= 0.5 / STEPS


def test_elements_are_dropped_independently() -> None:
    """Also those that share a random word, and those of neighbouring words."""
    torch.manual_seed(0)
    kept = (keep((1 << 20,), 0.5, torch.ones(1)) != 0).double() - 0.5
    for shift in (1, 2, 3, 4, 5, 8):
        assert abs(float((kept[:-shift] * kept[shift:]).mean()) * 4) < 5e-3


@given(shape=st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple), p=st.sampled_from([0.0, 0.25, 0.999]))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_shape_and_the_gradient_is_what_was_kept(shape: tuple[int, ...], p: float) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = drop(x, p)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == shape
    assert torch.equal(slope * x, y)
    assert torch.equal(slope == 0, y == 0)


def test_the_seed_of_torch_decides() -> None:
    x = torch.ones(100, 7)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(drop(x, 0.5))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_only_training_drops_anything() -> None:
    x, module = torch.randn(5, 4), Dropout(0.5)
    assert module.eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert (module.train()(x) == 0).any()
    assert not module.state_dict() and not list(module.parameters())


def test_torchs_own_can_be_asked_for() -> None:
    x, module, torchs = torch.randn(50, 4), Dropout(0.3), nn.Dropout(0.3)
    module.fused = False
    torch.manual_seed(0)
    first = module(x)
    torch.manual_seed(0)
    assert torch.equal(first, torchs(x))


def test_it_compiles() -> None:
    torch.manual_seed(0)
    module = Dropout(0.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(torch.ones(64, 64))
    assert set(y.unique().tolist()) == {0.0, 2.0}
