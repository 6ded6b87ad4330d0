"""The loss of ReTreever: queries search the tree, a share of them reads all leaves too, and both are scored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from retreever.batch import Batch
from retreever.detours import Detours, PerQuery, draw_detours, find_detours
from retreever.masses import mass_loss
from retreever.objective import Loss, masked_mean, reward_of
from retreever.results import TreeCrossAttentionResult
from retreever.search_loss import Mean, tree_loss
from retreever.tree.build import plan_for
from retreever.tree.value import Tree

if TYPE_CHECKING:
    from retreever.models.retreever import ReTreever

Queries = Float[Tensor, "b m d"]


class Draws(NamedTuple):
    """Random draws that fix the paths of a training step: noise of decisions, choices of detours, a reading budget."""

    noise: Float[Tensor, "b m depth"] | None = None
    choices: Int[Tensor, "b m depth"] | None = None
    budget: int | None = None

    def rows(self, which: slice) -> Draws:
        """The draws of some tasks of the batch."""
        noise, choices = (None if part is None else part[which] for part in self[:2])
        return Draws(noise, choices, self.budget)


def make_draws(model: ReTreever, batch: Batch, generator: torch.Generator) -> Draws:
    """`ReTreever.draws_for`."""
    b, m = batch.xt.shape[:2]
    device, c = batch.xt.device, model.config
    depth = plan_for(batch.xc.shape[1], c.branch, batch.context_mask is not None).depth
    noise = torch.rand(b, m, depth, generator=generator, device=generator.device).to(device)
    objective, budget = c.objective, None
    if objective.budgets:
        draw = torch.rand(2, generator=generator, device=generator.device).tolist()
        if objective.lambda_rl:
            budget = 1 + int(draw[1] * objective.budgets) if draw[0] < 0.5 else None
        else:  # the nodes alone learn: near the budget they will be read with
            budget = objective.budgets - int(draw[1] * objective.budgets / 2)
    if not (objective.detours and objective.lambda_rl):  # detours only train the search
        return Draws(noise, budget=budget)
    choices = draw_detours(b, m, depth, c.branch, objective.detours, generator, device)
    return Draws(noise, choices, budget)


def loss_with_leaves(model: ReTreever, batch: Batch, draws: Draws, mean: Mean | None) -> Loss:
    """`ReTreever.loss`."""
    batch = model.take(batch)
    memory = model._encode(batch.xc, batch.yc, batch.context_mask)
    query = model.embed.query(batch.xt)
    c, head, m = model.config, model.head, query.shape[1]
    count = math.ceil(c.objective.share * m)  # queries that read all leaves, too
    found = _search(model, query, memory, draws, count)
    assert found.leaves is not None
    raw = head.net(torch.cat([found.output, found.leaves], dim=1))
    task = head.loss(head.distribution(raw[:, :m]), batch.yt)
    if not model.training:  # in evaluation the loss is the task loss alone
        return Loss.only_task(masked_mean(task, batch.target_mask))
    first, truth = slice(count), batch.yt[:, :count]
    searched, full = head.distribution(raw[:, first]), head.distribution(raw[:, m:])
    mask = None if batch.target_mask is None else batch.target_mask[:, first]
    loss = tree_loss(
        replace(found, log_prob=found.log_prob[:, first], entropy=found.entropy[:, first]),
        task[:, first],
        head.loss(full, truth),
        reward_of(model.reward, searched, truth),
        reward_of(model.reward, full, truth),
        mask=mask,
        config=c.objective,
        chance=math.log(c.out) if c.head == "categorical" and c.out > 1 else None,
        detours=_detours(model, query[:, first], memory, found, draws.choices),
        masses=_masses(model, query[:, first], memory) if c.objective.lambda_mass else None,
        mean=mean,
    )
    if count < m:  # the others have a task loss alone
        rest = masked_mean(task, batch.target_mask) - masked_mean(task[:, first], mask)
        loss = loss._replace(total=loss.total + rest, task=loss.task + rest.detach())
    return loss if memory.plan.depth > c.mean_levels else _with_all_weights(model, loss)


def _search(model: ReTreever, query: Queries, memory: Tree, draws: Draws, count: int) -> TreeCrossAttentionResult:
    """The search of all queries, and all leaves for the first `count`."""
    objective = model.config.objective
    taught = objective.lambda_mass and not objective.lambda_rl  # then paths need not be sampled
    return model.attention(
        query,
        memory,
        None if taught else draws.noise,
        draws.choices,
        budget=draws.budget,
        leaves=count,
        sample=False if taught else None,
        check=False,
    )


def _detours(
    model: ReTreever, query: Queries, memory: Tree, found: TreeCrossAttentionResult, choices: Tensor | None
) -> Detours | None:
    """Detours of the first queries, those in `query`."""
    if choices is None:
        return None
    first = slice(query.shape[1])
    return find_detours(_heads(model, query), memory, found.path[:, first], choices[:, first], 1.0)


def _masses(model: ReTreever, query: Queries, memory: Tree) -> PerQuery:
    """`mass_loss` of the levels that learn."""
    return mass_loss(_heads(model, query), memory, max(1, memory.plan.depth - model.config.mean_levels))


def _heads(model: ReTreever, query: Queries) -> Float[Tensor, "b m h e"]:
    return model.attention.block.start(query)[1]


def _with_all_weights(model: ReTreever, loss: Loss) -> Loss:
    """A low tree needs no aggregator, yet processes that train together wait for gradients of all weights."""
    unused = sum(weight.sum() for weight in node_weights(model))
    return loss._replace(total=loss.total + 0 * unused)


def node_weights(model: ReTreever) -> list[nn.Parameter]:
    """Weights that inner nodes are made with, beyond those of the attention itself."""
    parts = (model.attention.aggregator, model.attention.correction)
    return [weight for part in parts if part is not None for weight in part.parameters()]
