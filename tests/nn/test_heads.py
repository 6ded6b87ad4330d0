"""Heads: which distribution they give and the loss that goes with it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from retreever.nn.heads import HEADS, make_head

DIM = 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(name: str, outputs: int = 3, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return make_head(name, DIM, 16, outputs, norm)


def truth(name: str, outputs: int = 3) -> Tensor:
    return torch.arange(10).reshape(2, 5) % outputs if name == "categorical" else rand(2, 5, outputs, seed=1)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", HEADS)
def test_one_distribution_and_one_loss_per_query(name: str, outputs: int, norm: bool) -> None:
    module = head(name, outputs, norm)
    dist = module(rand(2, 5, DIM))
    assert isinstance(dist, Distribution) and dist.batch_shape == (2, 5)
    assert dist.event_shape == (() if name == "categorical" else (outputs,))
    loss = module.loss(dist, truth(name, outputs))
    assert loss.shape == (2, 5) and loss.isfinite().all()
    assert dist.log_prob(truth(name, outputs)).shape == (2, 5)
    loss.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_gaussian_loss_is_the_negative_log_density_summed_over_outputs() -> None:
    module, features, y = head("gaussian"), rand(2, 5, DIM), truth("gaussian")
    mean, raw = module.net(features).split(3, dim=-1)
    expected = (0.5 * ((y - mean) / raw.exp()).square() + raw + 0.5 * math.log(2 * math.pi)).sum(-1)
    assert torch.allclose(module.loss(module(features), y), expected, atol=1e-5)
    assert torch.allclose(module(features).stddev, raw.exp())


def test_bounded_head_keeps_the_deviation_above_its_floor() -> None:
    """std = 0.05 + 0.95 softplus(s), whatever the features."""
    module, features = head("bounded"), rand(2, 5, DIM)
    raw = module.net(features).chunk(2, -1)[1]
    assert torch.allclose(module(features).stddev, 0.05 + 0.95 * F.softplus(raw))
    assert float(module(-1e4 * rand(50, 5, DIM)).stddev.detach().min()) >= 0.05


def test_categorical_loss_is_cross_entropy() -> None:
    module, features, y = head("categorical"), rand(2, 5, DIM), truth("categorical")
    dist = module(features)
    assert isinstance(dist, Categorical) and dist.logits.shape == (2, 5, 3)
    expected = F.cross_entropy(module.net(features).flatten(0, 1), y.flatten(), reduction="none").reshape(2, 5)
    assert torch.allclose(module.loss(dist, y), expected, atol=1e-6)


def test_point_head_is_trained_by_squared_error() -> None:
    module, features, y = head("point"), rand(2, 5, DIM), truth("point")
    dist = module(features)
    assert isinstance(dist, Independent) and isinstance(dist.base_dist, Normal) and (dist.stddev == 1).all()
    assert torch.allclose(module.loss(dist, y), (module.net(features) - y).square().sum(-1))


@pytest.mark.parametrize("name", HEADS)
def test_the_norm_of_a_pre_norm_stream_makes_the_head_blind_to_scale(name: str) -> None:
    plain, normed, features = head(name), head(name, norm=True), 10 * rand(2, 5, DIM)
    assert torch.allclose(normed.net(features), normed.net(3 * features), atol=1e-4)
    assert not torch.allclose(plain.net(features), plain.net(3 * features), atol=1e-4)
    assert sum(p.numel() for p in normed.parameters()) == sum(p.numel() for p in plain.parameters()) + 2 * DIM
