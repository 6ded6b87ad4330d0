"""Detours: which decisions they change, what the heads are told, and that they lead out of certain wrong turns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retreever.batch import Batch
from retreever.detours import Detours, detour_credit, draw_detours, find_detours
from retreever.models.retreever import ReTreever
from retreever.objective import Gate, ObjectiveConfig, three_term_loss
from retreever.ops.search.api import tree_attention
from retreever.search_loss import gates
from retreever.tree.aggregate import MeanAggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan
from retreever.tree.value import Tree

HEADS, WIDTH = 4, 3


def a_tree(n: int, branch: int, lengths: list[int] | None = None) -> Tree:
    generator = torch.Generator().manual_seed(n)
    rows = 2 if lengths is None else len(lengths)
    mask = None if lengths is None else torch.arange(n) < torch.tensor(lengths)[:, None]
    plan, nodes, node_mask = build_nodes(torch.zeros(rows, n, 1), MeanAggregator(), branch, mask)
    keys = torch.randn(rows, plan.nodes, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    if node_mask is not None:
        keys[~node_mask] = torch.nan
    return Tree(plan, nodes, node_mask, keys, keys)


CPU = torch.device("cpu")


def test_a_detour_makes_one_decision_at_random() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = draw_detours(40, 50, 4, 3, 0.25, generator, CPU)
    sent = choices >= 0
    assert choices.dtype == torch.int64 and sent.sum(dim=2).max() == 1
    assert float(sent.any(dim=2).float().mean()) == pytest.approx(0.25, abs=0.04)
    assert choices.unique().tolist() == [-1, 0, 1, 2]
    counts = torch.stack([(choices == child).sum(dim=(0, 1)) for child in range(3)])
    assert counts.min() > 20  # of about 42: every child at every level
    assert (draw_detours(40, 50, 4, 3, 0.0, generator, CPU) == -1).all()
    assert draw_detours(40, 50, 0, 3, 0.5, generator, CPU).shape == (40, 50, 0)


@pytest.mark.parametrize(
    ("n", "branch", "lengths"), [(64, 2, None), (40, 3, None), (40, 3, [40, 11, 1]), (9, 2, [9, 2])]
)
def test_the_heads_are_asked_at_the_decision_a_detour_changed(n: int, branch: int, lengths: list[int] | None) -> None:
    tree, generator = a_tree(n, branch, lengths), torch.Generator().manual_seed(1)
    b, m, plan = tree.keys.shape[0], 30, tree.plan
    q = torch.randn(b, m, HEADS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    noise = torch.rand(b, m, plan.depth, generator=generator)
    choices = draw_detours(b, m, plan.depth, branch, 0.5, generator, CPU)
    path = tree_attention(q, tree.keys, tree.values, plan, tree.mask, noise, choices, "reference").path
    found = find_detours(q, tree, path, choices, 1.0)
    assert found is not None and found.taken.any() and not found.taken[(choices < 0).all(dim=2)].any()
    for row, query in (choices >= 0).any(dim=2).nonzero().tolist():
        level = int((choices[row, query] >= 0).nonzero())
        above, child = divmod(int(path[row, query]) // branch ** (plan.depth - 1 - level), branch)
        group = [plan.offsets[level + 1] + above * branch + c for c in range(branch)]
        real = group if tree.mask is None else [r for r in group if tree.mask[row, r]]
        led = int(choices[row, query, level]) == child  # where the choice was padding the policy decided
        assert bool(found.taken[row, query]) == (len(real) > 1 and led)  # one child is no choice
        scores = torch.stack([(q[row, query] * tree.keys[row, r]).sum(dim=1) * WIDTH**-0.5 for r in real])
        expected = scores.log_softmax(dim=0)[real.index(group[child])].mean()
        assert found.log_prob[row, query].item() == pytest.approx(expected.item(), abs=1e-12)
    found.log_prob.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()  # padding nodes hold NaN


def test_a_tree_of_one_level_has_no_detours() -> None:
    tree = a_tree(3, 4)
    path = torch.zeros(2, 5, dtype=torch.int64)
    assert find_detours(torch.ones(2, 5, HEADS, WIDTH), tree, path, path[..., None][..., :0], 1.0) is None


def test_a_detour_is_imitated_as_far_as_it_reads_what_all_leaves_read() -> None:
    reward, full = torch.tensor([[-0.1, -0.6, -9.0, 0.0]]), torch.tensor([[-0.1, -0.1, -0.1, -0.5]])
    credit = detour_credit(reward, full)
    assert credit[0].tolist() == pytest.approx([1.0, 0.5, 0.0, 1.0])
    zero, log_prob, heads = torch.zeros(1, 4), torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), torch.full((1, 4), -7.0)
    taken, weight = torch.tensor([[True, True, True, False]]), torch.tensor([[1.0, 0.5, 1.0, 1.0]])
    detours = Detours(taken, heads, weight)
    config = ObjectiveConfig(alpha=0.0, detours=0.75)
    loss = three_term_loss(config, zero, zero, log_prob, zero, reward, full, detours=detours)
    assert float(loss.policy) == pytest.approx(4 * 0.5 / 4)
    assert float(loss.total) == pytest.approx((7 * 1.0 * 1.0 + 7 * 0.5 * 0.5) / 3 + 4 * 0.5 / 4)
    mask = torch.tensor([[True, False, True, True]])
    spoilt = reward.masked_fill(~mask, torch.nan)
    loss = three_term_loss(config, zero, zero, log_prob, zero, spoilt, full, mask, detours=detours)
    assert float(loss.total) == pytest.approx(7 * 1.0 * 1.0 / (0.75 * 3) + 4 * 0.5 / 3)


@pytest.mark.parametrize("certain", [HEADS, HEADS - 1], ids=["all heads", "all but one"])
def test_detours_lead_out_of_a_wrong_turn_the_heads_are_certain_of(certain: int) -> None:
    """Left is right. By REINFORCE alone no head moves, not even when another one votes for the left."""
    plan = TreePlan(4)
    start = torch.zeros(1, plan.nodes, HEADS, 1)
    start[0, 1, :certain], start[0, 0, certain:] = 37.0, 37.0

    def push(noise: float, choice: int = -1) -> Tensor:
        """What a step would add to the scores of the left child, head by head."""
        keys, zero = start.clone().requires_grad_(), torch.zeros(1, 1)
        q, given = torch.ones(1, 1, HEADS, 1), torch.full((1, 1, 1), noise)
        choices = torch.full((1, 1, 1), choice)
        found = tree_attention(q, keys, keys, plan, None, given, choices, "reference")
        reward = -2.3 * found.path.float()  # block 0 is the left one
        tree = Tree(plan, start[..., 0], None, keys, keys)
        detours = find_detours(q, tree, found.path, choices, 1.0) if choice >= 0 else None
        config = ObjectiveConfig(detours=0.5)
        loss = three_term_loss(config, zero, zero, found.log_prob, zero, reward, zero, detours=detours)
        loss.total.backward()
        assert keys.grad is not None
        return -keys.grad[0, 0, :, 0]

    assert all(push(noise).abs().max() < 1e-6 for noise in (0.1, 0.9))
    assert push(0.9, 0)[:certain].min() > 0.2 and push(0.9, 1).abs().max() < 1e-6


@pytest.mark.parametrize(("detours", "lambda_rl", "made"), [(0.5, 1.0, True), (0.0, 1.0, False), (0.5, 0.0, False)])
def test_a_model_makes_detours_where_its_search_is_trained(detours: float, lambda_rl: float, made: bool) -> None:
    objective = ObjectiveConfig(detours=detours, lambda_rl=lambda_rl)
    model = ReTreever(dim_x=1, dim_y=1, dim=16, heads=2, layers=1, hidden=16, objective=objective)
    data = Batch(*(torch.rand(3, n, 1, generator=torch.Generator().manual_seed(n)) for n in (16, 16, 9, 9)))
    draws = model.draws_for(data, torch.Generator().manual_seed(0))
    assert (draws.choices is not None) == made and draws.noise.shape == (3, 9, 3)
    model.loss(data, draws).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("gate", "knows", "imitated"), [("leaves", False, 0.0), ("leaves", True, 1.0), ("open", False, 1.0)]
)
def test_a_detour_counts_as_far_as_the_search_has_come_by_itself(gate: Gate, knows: bool, imitated: float) -> None:
    """A random turn of a search at chance reads what chance reads: to imitate it would make all children alike."""
    leaves, blind = torch.full((2, 3), 0.0), torch.full((2, 3), math.log(5))
    config = ObjectiveConfig(gate=gate, detours=0.5)
    search, weight = gates(config, leaves if knows else blind, leaves, None, math.log(5))
    assert float(search) == 1.0 and float(torch.as_tensor(weight).mean()) == imitated
