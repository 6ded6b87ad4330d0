"""What every backend promises alike: choices, padding that holds anything, numbers that are none, large values."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever import TreePlan, tree_attention

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["reference"]
BACKENDS += ["numba"] if importlib.util.find_spec("numba") else []
BACKENDS += ["triton"] if INTERPRETING and importlib.util.find_spec("triton") else []
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter computes with numpy
each_backend = pytest.mark.parametrize("impl", BACKENDS)
# One query takes a kernel of its own; seventeen fill more than one tile. In Triton each is a program of its own.
SIZES = [(16, 2, 1), (8, 2, 17), (27, 3, 4), (5, 8, 3)]
each_size = pytest.mark.parametrize(("n", "branch", "m"), SIZES)
each_backend_and_size = pytest.mark.parametrize(
    ("impl", "n", "branch", "m"),
    [(impl, n, branch, min(m, 2) if impl == "triton" else m) for impl in BACKENDS for n, branch, m in SIZES],
)


def inputs(n: int, branch: int, m: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, TreePlan]:
    generator = torch.Generator().manual_seed(seed)
    plan = TreePlan(n, branch)
    q, keys, values = (torch.randn(2, size, 2, 8, generator=generator) for size in (m, plan.nodes, plan.nodes))
    return q, keys, values, plan


@each_backend_and_size
def test_choices_are_those_of_the_reference(impl: Any, n: int, branch: int, m: int) -> None:
    q, keys, values, plan = inputs(n, branch, m)
    generator = torch.Generator().manual_seed(1)
    choices = torch.randint(-1, branch, (2, m, plan.depth), generator=generator)
    noise = torch.rand(2, m, plan.depth, generator=generator)
    mask = torch.ones(2, plan.nodes, dtype=torch.bool)
    if plan.depth:
        mask[1, 1] = False  # padding between real children: a choice of it is left to the policy
    for drawn in (None, noise):
        for hidden in (None, mask):
            found = tree_attention(q, keys, values, plan, hidden, drawn, choices, impl)
            exact = tree_attention(q.double(), keys.double(), values.double(), plan, hidden,
                                   None if drawn is None else drawn.double(), choices, "reference")  # fmt: skip
            assert torch.equal(found.path, exact.path)
            torch.testing.assert_close(found.output.double(), exact.output, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.log_prob.double(), exact.log_prob, rtol=1e-4, atol=1e-5)


@each_backend
def test_a_choice_of_probability_zero_is_taken(impl: Any) -> None:
    """Its probability underflows; only padding cannot be chosen."""
    plan = TreePlan(4)
    keys = torch.zeros(1, plan.nodes, 1, 1)
    keys[0, 0] = 1e4
    found = tree_attention(torch.ones(1, 1, 1, 1), keys, keys, plan, choices=torch.ones(1, 1, 1, dtype=torch.int64),
                           impl=impl)  # fmt: skip
    assert found.path.item() == 1 and found.log_prob.item() < -80 and found.log_prob.isfinite().all()


@each_backend_and_size
def test_what_padding_holds_never_matters(impl: Any, n: int, branch: int, m: int) -> None:
    """Every padding node holds one of four bad numbers."""
    q, keys, values, plan = inputs(n, branch, m)
    mask = torch.rand(2, plan.nodes, generator=torch.Generator().manual_seed(2)) < 0.8
    mask[:, ::branch] = True  # some child of every node
    mask[:, plan.leaf_offset :: plan.block] = True
    clean = tree_attention(q, keys, values, plan, mask, impl=impl)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 3e38])[torch.arange(plan.nodes) % 4, None, None]
    dirty = [torch.where(mask[..., None, None], nodes, bad).requires_grad_() for nodes in (keys, values)]
    found = tree_attention(q, *dirty, plan, mask, impl=impl)
    for got, want in zip(found[:4], clean[:4], strict=True):
        torch.testing.assert_close(got.detach(), want)
    (found.output.sum() + found.log_prob.sum() + found.entropy.sum()).backward()
    for nodes in dirty:
        assert nodes.grad is not None and nodes.grad.isfinite().all() and not nodes.grad[~mask].any()


@each_backend_and_size
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_keys_that_are_no_numbers_are_not_hidden(impl: Any, n: int, branch: int, m: int, spoilt: float) -> None:
    """A search over them must not look as if it had worked."""
    q, keys, values, plan = inputs(n, branch, m)
    found = tree_attention(q, torch.full_like(keys, spoilt), values, plan, impl=impl)
    assert found.output.isnan().all()
    assert not plan.depth or (found.log_prob.isnan().all() and found.entropy.isnan().all())


@pytest.mark.parametrize("impl", [impl for impl in BACKENDS if impl != "triton"])
@each_size
def test_values_near_the_largest_number_do_not_overflow(impl: Any, n: int, branch: int, m: int) -> None:
    """Weights sum to one, so the output is no larger than the largest value. (Triton adds up before it divides.)"""
    q, keys, values, plan = inputs(n, branch, m)
    large = torch.full_like(values, 3e38)
    found = tree_attention(q, keys, large, plan, impl=impl)
    torch.testing.assert_close(found.output, large[:, :m] if plan.nodes >= m else torch.full_like(q, 3e38))
