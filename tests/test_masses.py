"""`mass_loss`: 0 where scores of nodes are right, more elsewhere, nothing from padding, and it teaches the search."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import InputError, TreeCrossAttention
from retreever.masses import mass_loss
from retreever.ops.search.api import counted_keys
from retreever.tree.value import Tree

HEADS, WIDTH, DIM = 2, 4, 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tree_of(context: Tensor, mask: Tensor | None = None, branch: int = 2) -> Tree:
    torch.manual_seed(0)
    module = TreeCrossAttention(DIM, HEADS, branch, aggregator="mean", log_count=True, residual="none", hidden=0)
    return module.build(context, mask)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 20), branch=st.integers(2, 4))
def test_nodes_of_equal_tokens_are_right(n: int, branch: int) -> None:
    """Their mean is each of them, and the log of their number is what is missing."""
    tree, q = tree_of(rand(1, 1, DIM).expand(2, n, DIM), branch=branch), rand(2, 3, HEADS, WIDTH)
    assert float(mass_loss(q, tree).detach().abs().max()) < 1e-5


@settings(max_examples=25, deadline=None)
@given(n=st.integers(3, 20), branch=st.integers(2, 4), seed=st.integers(0, 99))
def test_it_is_a_divergence(n: int, branch: int, seed: int) -> None:
    tree, q = tree_of(rand(2, n, DIM, seed=seed), branch=branch), 3 * rand(2, 3, HEADS, WIDTH, seed=seed)
    loss = mass_loss(q, tree)
    assert loss.shape == (2, 3) and bool((loss > -1e-5).all())


@pytest.mark.parametrize("branch", [2, 3])
def test_padding_counts_nowhere(branch: int) -> None:
    """Nor does NaN in it: the gradient is finite, and rows do not see each other."""
    context, q = rand(2, 11, DIM), rand(2, 3, HEADS, WIDTH).requires_grad_()
    mask = torch.arange(11) < torch.tensor([[11], [5]])
    loss = mass_loss(q, tree_of(context.masked_fill(~mask[..., None], 0), mask, branch))
    other = mass_loss(q, tree_of(context.masked_fill(~mask[..., None], 9), mask, branch))
    loss.sum().backward()
    assert torch.equal(loss, other) and bool(loss.isfinite().all()) and bool(q.grad.isfinite().all())


def test_queries_that_are_not_projected_are_refused() -> None:
    with pytest.raises(InputError, match=r"^q: expected shape \(b=2, m, h=2, e=4\), got 3 axes"):
        mass_loss(rand(2, 3, DIM), tree_of(rand(2, 8, DIM)))


def test_descending_it_leads_the_search_to_the_weight() -> None:
    """Keys of inner nodes that start at random learn where attention looks."""
    tree, q = tree_of(3 * rand(1, 64, DIM)), 3 * rand(1, 40, HEADS, WIDTH)
    top = tree.plan.leaf_offset
    keys = torch.nn.Parameter(rand(1, top, HEADS, WIDTH, seed=1))
    optimiser = torch.optim.Adam([keys], 0.05)
    losses = []
    for _ in range(80):
        now = torch.cat([keys, tree.keys[:, top:].detach()], dim=1)
        loss = mass_loss(q, replace(tree, keys=now, counted=counted_keys(now, tree.log_count))).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.4 * losses[0]


def test_scores_that_are_far_too_large_come_down() -> None:
    """Their part of the loss is a straight line, not a constant: it never ends below 0, and its slope is bounded."""
    tree, q = tree_of(rand(1, 16, DIM)), rand(1, 4, HEADS, WIDTH)
    top, counts = tree.plan.leaf_offset, torch.zeros(1, tree.plan.nodes)
    counts[:, :top] = 40.0
    large = replace(tree, log_count=counts)
    assert large.log_count is not None
    large.log_count.requires_grad_()
    loss = mass_loss(q, large)
    loss.sum().backward()
    assert bool((loss > 0).all()) and large.log_count.grad is not None
    slope = large.log_count.grad[0, :top]
    assert bool((slope > 0).all()) and float(slope.max()) < 4 * math.exp(3.0)
