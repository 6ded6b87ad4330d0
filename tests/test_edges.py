"""Edges of the interface: sizes, layouts, devices and magnitudes nobody should give, each refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever import ReTreever, TreeCrossAttention, TreePlan, leaf_order, load_pretrained
from retreever.batch import Batch, collate
from retreever.errors import InputError, RetreeverError
from retreever.tasks.copy import CopyTask
from retreever.train import TrainConfig, fit

X = torch.tensor([[[0.1], [0.7], [-0.4], [1.2], [0.3]]])
MASK = torch.tensor([[True, True, True, False, False]])


def model() -> ReTreever:
    return ReTreever(dim_x=1, dim_y=1, dim=16, heads=2, hidden=16, layers=1).eval()


def attend(context: Tensor, mask: Tensor | None = None, branch: int = 2) -> Tensor:
    module = TreeCrossAttention(16, 2, branch).eval()
    return module(torch.ones(1, 3, 16), module.build(context, mask)).output


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(torch.ones(1, 5, 16).to_sparse()), "context: expected a dense tensor of real numbers, got"),
        (lambda: model().predict(X.to_sparse(), X, X), "xc: expected a dense tensor of real numbers, got float32 sp"),
        (lambda: model().predict(X, X.to_sparse(), X), "yc: expected shape"),
        (lambda: model().predict(X.to(torch.complex64), X, X), "xc: expected a dense tensor of real numbers, got comp"),
        (lambda: leaf_order("kd", X > 0), "x: expected numbers, got torch.bool"),
        (lambda: leaf_order("kd", X.to(torch.complex64)), "x: expected a dense tensor of real numbers, got complex64"),
        (lambda: collate([Batch([[1.0]], X, X, X)]), r"rows\[0\].xc: expected a dense tensor of two axes .*, got list"),
        (lambda: collate([Batch(X, X.to_sparse(), X, X)]), r"rows\[0\].yc: expected a dense tensor of two axes"),
        (lambda: TreePlan(5, 10**30), "branch: expected an int < 2"),
        (lambda: TreePlan(5, 10 ** (10**4)), "branch: expected an int < 2.*63, got one of more than 300 digits"),
        (lambda: fit(model(), CopyTask(8), TrainConfig(steps=1), device="bogus"), "device: expected auto, cpu, cuda"),
        (lambda: model().predict(X.to("meta"), X.to("meta"), X.to("meta")), "xc: expected the device of the weights"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RetreeverError, match=rf"^{message}[^\n]*$"):
        call()


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("branch", [5, 64, 10**9, 2**62])
def test_a_branch_beyond_the_tokens_is_attention_over_all(branch: int, mask: Tensor | None) -> None:
    """However large: it costs no memory."""
    context = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = attend(context, mask, branch=8)
    torch.manual_seed(0)
    assert torch.allclose(attend(context, mask, branch), expected, atol=1e-6)
    assert TreePlan(5, branch).depth == 0 and TreePlan(5, branch) == TreePlan(5, 5)


@pytest.mark.parametrize("size", [1e18, 1e25, 1e30])
@pytest.mark.parametrize("which", range(3))
def test_numbers_whose_squares_overflow_are_refused(which: int, size: float) -> None:
    """Norms square them; what came out was NaN without a word."""
    points = [X, X, X]
    points[which] = X * size
    with pytest.raises(InputError, match=r"^x?y?[ct]+: expected values of at most 2\.9e\+17, .* got 1\.2e\+"):
        model().predict(*points)


@pytest.mark.parametrize("which", range(3))
def test_numbers_up_to_that_size_give_finite_predictions(which: int) -> None:
    points = [X, X, X]
    points[which] = X * 2.3e17
    dist = model().predict(*points)
    assert bool(dist.mean.isfinite().all()) and bool(dist.log_prob(X).isfinite().all())


def test_large_numbers_at_padding_are_not_looked_at() -> None:
    x = X.masked_fill(~MASK[..., None], 1e30)
    assert torch.equal(model().predict(x, x, X, MASK).mean.isfinite(), torch.ones_like(X, dtype=torch.bool))


def test_no_rows_have_no_loss() -> None:
    none = torch.zeros(0, 5, 1)
    trained = model().train()
    loss = trained.loss(Batch(none, none, none, none))
    loss.total.backward()
    assert float(loss.total.detach()) == 0.0 and all(float(term) == 0 for term in loss[1:])
    assert all(w.grad is None or bool((w.grad == 0).all()) for w in trained.parameters())


def test_weights_are_loaded_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        loaded = load_pretrained("gp")
    assert {weight.device.type for weight in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded.predict(X, X, X).mean, load_pretrained("gp").predict(X, X, X).mean)
