"""The `paper` preset: sizes, residuals, gradients and policy term of the paper's public code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from retreever import Batch, ObjectiveConfig, ReTreever, TransformerCA, TreeCrossAttention
from retreever.models.retreever import Draws
from retreever.models.retreever_config import ReTreeverConfig

COPY = {"inputs": "sequence", "dim_y": 12, "head": "categorical", "encoder": "identity"}
SETTINGS = {"gp": {}, "celeba": {"dim_x": 2, "dim_y": 3}, "emnist": {"dim_x": 2, "dim_y": 1}, "copy": COPY}
# Parameters of the published models, which carry a LayerNorm (64 scales, 64 shifts) that they never use.
RETREEVER = {"gp": 366_786, "celeba": 367_558, "emnist": 366_914, "copy": 185_996}
TRANSFORMER_CA = {"gp": 325_186, "celeba": 325_958, "emnist": 325_314, "copy": 144_396}
UNUSED_NORM = 128


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def published(task: str = "gp", reward: str | None = None, **settings: object) -> ReTreever:
    """ReTreever of that task as the paper's code has it."""
    order = {"order": "given"} if task == "copy" else {}
    torch.manual_seed(0)
    config = ReTreeverConfig(**SETTINGS[task], **order, **settings, objective=ObjectiveConfig(reward=reward))
    return ReTreever(replace(config, impl="reference").as_published())


@pytest.mark.parametrize("task", SETTINGS)
def test_retreever_has_the_published_parameters(task: str) -> None:
    assert parameters(published(task)) == RETREEVER[task] - UNUSED_NORM


@pytest.mark.parametrize("residual", ["normalised", "doubled"])
@pytest.mark.parametrize("task", SETTINGS)
def test_transformer_ca_has_the_published_parameters(task: str, residual: str) -> None:
    """The doubled residual belongs to the tree attention alone: here it means the normalised one."""
    module = TransformerCA(**SETTINGS[task], residual=residual)
    assert parameters(module) == TRANSFORMER_CA[task] - UNUSED_NORM
    assert module.attention.block.residual == "normalised"


def test_the_preset_changes_what_the_paper_does_differently_and_nothing_else() -> None:
    config = ReTreeverConfig(dim_x=2, dim_y=3, branch=4, order="axis", dropout=0.1)
    preset = config.as_published()
    changed = {name for name in vars(config) if getattr(config, name) != getattr(preset, name)}
    assert changed == {"detach", "residual", "objective"} and preset.detach and preset.residual == "doubled"
    assert preset.objective == ObjectiveConfig(baseline="none", gate="open")
    assert preset.as_published() == preset


@pytest.mark.parametrize(
    ("reward", "baseline", "constant"),
    [
        (None, "none", 0.0),
        ("accuracy", "none", 0.0),
        ("log-likelihood", "none", 0.0),
        ("cross-entropy", "constant", -math.log(12)),
    ],
)
def test_the_baseline_follows_the_reward(reward: str | None, baseline: str, constant: float) -> None:
    """None, except minus log of the number of classes for the cross-entropy reward."""
    objective = published("copy", reward).config.objective
    assert objective.baseline == baseline and objective.constant == pytest.approx(constant, abs=1e-6)
    assert (objective.lambda_rl, objective.lambda_ca, objective.alpha) == (1.0, 1.0, 0.01)


def test_the_search_is_trained_by_reinforce_alone_and_from_the_start() -> None:
    ours = ReTreeverConfig(head="categorical", objective=ObjectiveConfig(detours=0.2))
    objective = ours.as_published().objective
    assert (objective.gate, objective.detours) == ("open", 0.0)


def test_residuals_of_every_part() -> None:
    """The tree attention adds the query twice; encoder and aggregator are LN x + f(LN x); no norm of keys or output."""
    module = published()
    blocks = [*module.encoder.layers, module.attention.aggregator.layer]
    assert [block.residual for block in blocks] == ["normalised"] * 7
    assert module.attention.block.residual == "doubled"
    assert all(b.context_norm is None and not b.shared_norm for b in [*blocks, module.attention.block])
    assert not any(isinstance(part, nn.LayerNorm) for part in module.head.modules())


@torch.no_grad()
def test_the_tree_attention_by_hand() -> None:
    """FF-block(attn(LN q) + LN q + q) with FF-block(y) = LN y + FF(LN y), over raw keys and values."""
    module = published().attention.eval()
    block, query, context = module.block, rand(2, 5, 64), rand(2, 2, 64)
    normed = block.norm(query)
    keys, values = block.to_kv(context).chunk(2, dim=-1)
    heads = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (block.to_q(normed), keys, values))
    attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    middle = block.feed_norm(block.to_out(attended) + normed + query)
    expected = middle + block.feed_forward(middle)
    assert float((module(query, module.build(context)).output - expected).abs().max()) <= 2e-6


@pytest.mark.parametrize("detach", [False, True])
def test_detach_cuts_gradients_between_tree_levels(detach: bool) -> None:
    """Detached, tokens learn only where a leaf was read; otherwise through every node above them as well."""
    torch.manual_seed(0)
    module, context = TreeCrossAttention(16, 4, detach=detach, impl="reference"), rand(1, 16, 16).requires_grad_()
    tree = module.build(context)
    result = module(rand(1, 1, 16), tree)
    (grad,) = torch.autograd.grad(result.output.square().sum(), context, retain_graph=True)
    read = torch.zeros(16, dtype=torch.bool)
    read[result.selected[result.selected >= tree.plan.leaf_offset] - tree.plan.leaf_offset] = True
    assert read.sum() == 2 and grad[0, read].abs().sum(-1).gt(0).all()
    assert grad[0, ~read].any() != detach
    (grad,) = torch.autograd.grad(result.log_prob.sum(), context, retain_graph=True, materialize_grads=True)
    assert grad.any() != detach
    result.log_prob.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.aggregator.parameters())


def test_the_policy_term_by_hand() -> None:
    """-mean(log pi (R - b)) - alpha * mean entropy per decision, R = -CE and b = -log 12."""
    module = published("copy", "cross-entropy")
    symbols = torch.randint(2, 12, (3, 8), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8.0)[None, :, None].expand(3, 8, 1)
    data, noise = Batch(positions, symbols, positions, symbols.flip(1)), torch.rand(3, 8, 2)
    loss = module.loss(data, Draws(noise))
    found = module.search(module.encode(data.xc, data.yc), data.xt, noise)
    reward = module.head(found.output).log_prob(data.yt).detach()
    policy = -(found.log_prob * (reward + math.log(12))).mean() - 0.01 * (found.entropy / 2).mean()
    assert float(loss.policy) == pytest.approx(float(policy.detach()), abs=1e-5)
    assert float(loss.reward) == pytest.approx(float(reward.mean()), abs=1e-5)
    assert float(loss.task) == pytest.approx(-float(reward.mean()), abs=1e-5)
    assert torch.allclose(loss.total.detach(), loss.task + loss.policy + loss.leaves)


@pytest.mark.parametrize(
    ("head", "reward"),
    [
        ("categorical", "accuracy"),
        ("point", "squared-error"),
        ("gaussian", "log-likelihood"),
        ("bounded", "log-likelihood"),
    ],
)
def test_the_reward_that_goes_with_a_head(head: str, reward: str) -> None:
    assert ReTreever(head=head, layers=0).reward == reward
