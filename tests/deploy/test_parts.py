"""What is exported, run by torch itself: equal to the models, for every budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retreever import ReTreever
from retreever.deploy.parts import Encode, Query
from retreever.tree.build import plan_for


def small_model(branch: int = 2, dim_x: int = 1, **more: Any) -> ReTreever:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
    return ReTreever(**sizes, branch=branch, dim_x=dim_x, impl="reference", **more).eval()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 14), slots=st.integers(1, 14), branch=st.integers(2, 4), means=st.booleans(), data=st.data())
def test_a_budget_given_as_a_tensor_reads_what_the_model_reads(
    n: int, slots: int, branch: int, means: bool, data
) -> None:
    """A context in n of some slots, one graph for all budgets: same predictions, same nodes, weights that add to 1.

    Also where nodes are means that stand for as many tokens as they have, and for a budget of more than there are.
    """
    most, n = max(n, slots), min(n, slots)
    budget = data.draw(st.integers(1, most + 3))
    means_of = {"aggregator": "mean", "log_count": True} if means else {}
    model = small_model(branch, dim_x=2, **means_of)
    query = Query(model, plan_for(most, branch, ragged=True), most, explain=True)
    x, y, xt = torch.rand(1, most, 2), torch.randn(1, most, 1), torch.rand(1, 5, 2)
    mask = torch.zeros(1, most, dtype=torch.bool)
    mask[:, torch.randperm(most)[:n]] = True
    with torch.no_grad():
        tree = Encode(model)(x, y, mask)
        found = query(tree["keys"], tree["values"], tree["node_mask"], xt, torch.tensor([budget]))
        dist = model.predict(x, y, xt, mask, budget=budget)
        search = model.search(model.encode(x, y, mask), xt, budget=budget)
    torch.testing.assert_close(found["mean"], dist.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["std"], dist.stddev, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found["selected"][0].tolist(), search.selected[0].tolist(), strict=True):
        assert [row for row in ours if row >= 0] == [row for row in theirs if row >= 0]
    torch.testing.assert_close(found["weights"].sum(dim=2), torch.ones(1, 5))
    assert (found["weights"][found["selected"] < 0] == 0).all()


@pytest.mark.parametrize("log_count", [False, True])
def test_the_policy_explains_the_path_and_its_probability(log_count: bool) -> None:
    """The search takes the likelier child; the product along its path is the probability of the path."""
    model, n = small_model(log_count=log_count), 12
    plan = plan_for(n, 2, ragged=True)
    x, xt = torch.rand(1, n, 1), torch.rand(1, 7, 1)
    mask = torch.arange(n)[None] < 9
    with torch.no_grad():
        tree = Encode(model)(x, x.sin(), mask)
        found = Query(model, plan, None, explain=True)(tree["keys"], tree["values"], tree["node_mask"], xt)
    policy, path = found["policy"][0], found["path"][0]
    log_prob = torch.zeros(7)
    for level in range(1, plan.depth + 1):
        taken = plan.offsets[level] + path // 2 ** (plan.depth - level)
        chance = policy[torch.arange(7), taken]
        sibling = policy[torch.arange(7), taken + 1 - 2 * ((taken - plan.offsets[level]) % 2)]
        assert (chance >= sibling).all()
        torch.testing.assert_close(chance + sibling, torch.ones(7))
        log_prob += chance.log()
    torch.testing.assert_close(found["log_prob"][0], log_prob, rtol=1e-5, atol=1e-5)
