"""Memories that take further points: equal to encoding all at once, or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import InputError, ReTreever, Tree

SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "hidden": 16, "heads": 2, "window": 4, "order": "given"}


def model(encoder: str, **more: Any) -> ReTreever:
    torch.manual_seed(0)
    return ReTreever(**SIZES | {"encoder": encoder, "impl": "reference"} | more).double().eval()


def points(b: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.rand(b, n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (9 * x).sin()


def real(b: int, n: int, missing: list[int]) -> Tensor:
    return torch.arange(n) < n - torch.tensor(missing)[:b, None]


@pytest.mark.parametrize("aggregator", ["transformer", "mean"])
@pytest.mark.parametrize("encoder", ["identity", "local"])
@given(steps=st.lists(st.integers(1, 6), min_size=1, max_size=4), capacity=st.integers(1, 12))
@settings(max_examples=15)
@torch.no_grad()
def test_updates_equal_encoding_at_once(encoder: str, aggregator: str, steps: list[int], capacity: int) -> None:
    """Predictions and nodes, whatever arrives together and however often the tree has to grow."""
    reader = model(encoder, aggregator=aggregator)
    x, y = points(2, 3 + sum(steps))
    memory, at = reader.encode(x[:, :3], y[:, :3], capacity=capacity), 3
    for step in steps:
        memory = reader.update(memory, x[:, at : at + step], y[:, at : at + step])
        at += step
    whole = reader.encode(x, y, capacity=memory.plan.n)
    assert memory.plan == whole.plan and (memory.keys - whole.keys).abs().max() <= 1e-10
    target = torch.linspace(0, 1, 7, dtype=torch.float64).expand(2, 7)[..., None]
    assert (reader.answer(memory, target).mean - reader.answer(whole, target).mean).abs().max() <= 1e-10


@pytest.mark.parametrize("encoder", ["identity", "local"])
@torch.no_grad()
def test_rows_may_get_different_numbers_of_points(encoder: str) -> None:
    """Each row is as alone; points behind the mask are never read."""
    reader, (x, y) = model(encoder), points(2, 9)
    y[1, 3:5] = torch.nan
    first, second = real(2, 5, [0, 2]), real(2, 4, [1, 0])
    memory = reader.encode(x[:, :5], y[:, :5], first, capacity=16)
    memory = reader.update(memory, x[:, 5:], y[:, 5:], second)
    for row, kept in enumerate((torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]), torch.tensor([0, 1, 2, 5, 6, 7, 8]))):
        alone = reader.encode(x[row : row + 1, kept], y[row : row + 1, kept], capacity=16)
        found = reader.answer(memory[row], x[:1, :4]).mean
        assert (found - reader.answer(alone, x[:1, :4]).mean).abs().max() <= 1e-10


def test_gradients_reach_points_that_came_later() -> None:
    reader, (x, y) = model("local"), points(1, 8)
    y.requires_grad_()
    memory = reader.update(reader.encode(x[:, :5], y[:, :5], capacity=8), x[:, 5:], y[:, 5:])
    reader.answer(memory, x[:, 7:], budget=8).mean.sum().backward()  # type: ignore[no-untyped-call]
    assert y.grad is not None and (y.grad[0, 5:] != 0).all() and (y.grad[0, :5] != 0).any()


@torch.no_grad()
def test_spatial_orders_keep_new_points_beside() -> None:
    reader, (x, y) = model("identity", order="kd"), points(1, 20)
    memory = reader.update(reader.encode(x[:, :12], y[:, :12]), x[:, 12:], y[:, 12:])
    assert memory.beside is not None and memory.tokens == 20
    wanted = reader.set_reading("full").predict(x, y, x[:, :3])
    assert (reader.answer(memory, x[:, :3]).mean - wanted.mean).abs().max() <= 1e-10


@torch.no_grad()
def test_what_cannot_be_updated_says_so(tmp_path: Any) -> None:
    x, y = points(1, 6)
    cases: list[tuple[ReTreever, str]] = [
        (model("transformer"), "encoder: expected 'identity' or 'local' for update, since others mix all tokens, got "),
        (model("local", order="kd"), "memory: expected one made by encode() with order='given', whose last tokens"),
    ]
    for reader, line in cases:
        memory = reader.encode(x, y)
        with pytest.raises(InputError) as error:
            reader.update(memory, x, y)
        assert str(error.value).startswith(line) and "\n" not in str(error.value)
    with pytest.raises(InputError, match="capacity: expected None with order='kd'"):
        model("identity", order="kd").encode(x, y, capacity=9)
    reader = model("local")
    memory = reader.encode(x, y)
    with pytest.raises(InputError, match="xc: expected 1 rows, as many as the memory has, got 2"):
        reader.update(memory, x.expand(2, -1, -1), y.expand(2, -1, -1))
    with pytest.raises(InputError, match="memory: expected one made by encode"):
        reader.update(Tree.load(memory.save(tmp_path / "memory")), x, y)
