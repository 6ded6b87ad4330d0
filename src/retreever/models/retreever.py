"""ReTreever: an encoder, Tree Cross Attention and a head (paper, section 3.4). Without an encoder it is TCA alone."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_choice, reject
from retreever.attention import TreeCrossAttention
from retreever.attention_inputs import check_budget
from retreever.batch import Batch
from retreever.detours import Detours, PerQuery, draw_detours, find_detours
from retreever.masses import mass_loss
from retreever.models.base import Contexts, Mask, Model, Targets, Values, check_memory, take_batch
from retreever.models.config import embedding, encoder, head, read_out, resolve
from retreever.models.retreever_config import ReTreeverConfig
from retreever.models.stream import encode_points, update_memory
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import (
    REWARDS,
    Loss,
    Reward,
    RewardFunction,
    masked_mean,
    reward_of,
)
from retreever.results import Retrieval, TreeCrossAttentionResult
from retreever.search_loss import Mean, tree_loss
from retreever.tree.aggregate import Aggregator
from retreever.tree.build import plan_for
from retreever.tree.order import in_order, leaf_order, permutation_of
from retreever.tree.plan import TreePlan
from retreever.tree.value import Tree


class Draws(NamedTuple):
    """Random draws that fix the paths of a training step: noise of decisions, choices of detours, a reading budget."""

    noise: Float[Tensor, "b m depth"] | None = None
    choices: Int[Tensor, "b m depth"] | None = None
    budget: int | None = None

    def rows(self, which: slice) -> Draws:
        """The draws of some tasks of the batch."""
        noise, choices = (None if part is None else part[which] for part in self[:2])
        return Draws(noise, choices, self.budget)


class ReTreever(Model):
    """ReTreever: encoder, tree, search, head.

    Args:
        config: all settings, or give them as keyword arguments.
        reward: a name, or any function (distribution, truth) -> (b, m); None takes that of the objective.
        aggregator: a name or a module, as for `TreeCrossAttention`; None takes that of the settings.
    """

    config: ReTreeverConfig
    memory = Tree

    def __init__(
        self,
        config: ReTreeverConfig | None = None,
        *,
        reward: Reward | RewardFunction | None = None,
        aggregator: Aggregator | nn.Module | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        if isinstance(aggregator, str):
            fields["aggregator"] = aggregator
        self.config = resolve(ReTreeverConfig, config, fields)
        c = self.config
        self.embed, self.encoder, self.head = embedding(c), encoder(c), head(c)
        self.attention = TreeCrossAttention(
            **read_out(c) | {"residual": c.residual},
            branch=c.branch,
            aggregator=aggregator if isinstance(aggregator, nn.Module) else c.aggregator,
            detach=c.detach,
            retrieval=c.retrieval,
            budget=c.budget,
            correct=c.correct,
            mean_levels=c.mean_levels,
            log_count=c.log_count,
        )
        natural: dict[str, Reward] = {"categorical": "accuracy", "point": "squared-error"}
        default = natural.get(c.head, "log-likelihood")
        if reward is not None and not callable(reward):
            check_choice("reward", reward, REWARDS)
        self.reward: Reward | RewardFunction = reward or c.objective.reward or default

    @classmethod
    def from_transformer_ca(
        cls,
        model: TransformerCA,
        *,
        aggregator: Aggregator | nn.Module = "transformer",
        reward: Reward | RewardFunction | None = None,
        **fields: Any,
    ) -> ReTreever:
        """The trained `model` with its attention read through a tree of means, and a learned correction of them.

        The correction is 0 at first, so any budget approximates `model`, one of all tokens is equal to it, and training
        goes on from there. `aggregator="mean", correct=False` has nothing to learn. `fields` are further settings,
        `mean_levels=2` unless given.
        """
        if not isinstance(model, TransformerCA):
            reject("model", "a TransformerCA", type(model).__name__)
        settings = {**asdict(model.config), "correct": True, "mean_levels": 2, "log_count": True, "dropout": 0.0}
        tree = cls(reward=reward, aggregator=aggregator, **settings | fields)
        tree.to(next(model.parameters()))
        found = tree.load_state_dict(model.state_dict(), strict=False)
        new = ("attention.aggregator.", "attention.correction.")
        assert not found.unexpected_keys and all(name.startswith(new) for name in found.missing_keys), found
        return tree.train(model.training)

    def set_reading(self, retrieval: Retrieval = "policy", budget: int | None = None) -> ReTreever:
        """Change how trees are read from now on, with the same weights; returns the model."""
        self.config = replace(self.config, retrieval=retrieval, budget=budget)
        self.attention.retrieval, self.attention.budget = retrieval, budget
        return self

    def leaf_order(self, xc: Contexts, mask: Mask = None) -> Int[Tensor, "b n"]:
        """Index of the context point of every token in leaf order, for each row; real points first."""
        c = self.config
        return leaf_order(c.order, xc, mask, branch=c.branch, axis=c.axis, seed=c.order_seed)

    def encode(self, xc: Contexts, yc: Values, mask: Mask = None, capacity: int | None = None) -> Tree:
        """Prepare context points (xc, yc) for any number of calls of `answer`. `mask` is True at real points.

        `capacity` makes room for as many points, if they are kept in the order given: `update` then appends to the tree
        itself.
        """
        return encode_points(self, xc, yc, mask, capacity)

    def update(
        self,
        memory: Tree,
        xc: Contexts,
        yc: Values,
        mask: Mask = None,
        *,
        window: int | None = None,
        in_place: bool = False,
    ) -> Tree:
        """The memory with further context points, in O(log n) per point; for the encoders "identity" and "local".

        With `capacity` and order="given" it equals encoding all points at once; otherwise new points form a tree beside
        (see `TreeCrossAttention.append`, also for `window` and `in_place`).
        """
        return update_memory(self, memory, xc, yc, mask, window, in_place)

    def answer(self, memory: Tree, xt: Targets, budget: int | None = None) -> Distribution:
        """Predictions at `xt` from a prepared context; `budget` tokens per query, None takes that of the settings."""
        check_memory(self, memory, xt)
        if budget is not None:
            check_budget(budget)
        return self.head(self.attention(self.embed.query(xt), memory, budget=budget, check=False).output)

    def predict(
        self,
        xc: Contexts,
        yc: Values,
        xt: Targets,
        mask: Mask = None,
        budget: int | None = None,
        *,
        chunk: int | None = None,
    ) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); see `answer`, `encode` and `Model.predict`."""
        return self._in_chunks(xc, yc, xt, mask, chunk, budget=budget)

    def search(
        self,
        memory: Tree,
        xt: Targets,
        noise: Float[Tensor, "b m depth"] | None = None,
        budget: int | None = None,
    ) -> TreeCrossAttentionResult:
        """The search behind the predictions at `xt`: paths, selected nodes, probabilities."""
        check_memory(self, memory, xt)
        return self.attention(self.embed.query(xt), memory, noise, budget=budget)

    def tokens(self, n: int) -> int:
        """Nodes attended to per query: the rejected siblings of a path and one leaf block, more under a budget."""
        c = self.config
        return n if c.retrieval == "full" else min(n, max(c.budget or 1, TreePlan(n, c.branch).tokens))

    def draws_for(self, batch: Batch, generator: torch.Generator) -> Draws:
        """Draws that fix the paths of `loss`, detours included, for the whole batch."""
        b, m = batch.xt.shape[:2]
        device = batch.xt.device
        depth = plan_for(batch.xc.shape[1], self.config.branch, batch.context_mask is not None).depth
        noise = torch.rand(b, m, depth, generator=generator, device=generator.device).to(device)
        objective, budget = self.config.objective, None
        if objective.budgets:
            draw = torch.rand(2, generator=generator, device=generator.device).tolist()
            budget = 1 + int(draw[1] * objective.budgets) if draw[0] < 0.5 else None
        if not (objective.detours and objective.lambda_rl):  # detours only train the search
            return Draws(noise, budget=budget)
        choices = draw_detours(b, m, depth, self.config.branch, objective.detours, generator, device)
        return Draws(noise, choices, budget)

    @property
    def capturable(self) -> bool:
        """Whether a training step can be a CUDA graph: not where every step reads another number of tokens."""
        return not self.config.objective.budgets

    def loss(self, batch: Batch, draws: Draws | None = None, mean: Mean | None = None) -> Loss:
        """The three-term loss, mean over real targets.

        Args:
            batch: context points and targets.
            draws: made by `draws_for`, fix the sampled paths and detours; without them paths are sampled and no detours
                are made.
            mean: returns the mean of a tensor over all processes that train together.
        """
        batch = take_batch(self, batch)
        memory = self._encode(batch.xc, batch.yc, batch.context_mask)
        query = self.embed.query(batch.xt)
        draws, objective = draws or Draws(), self.config.objective
        taught = objective.lambda_mass and not objective.lambda_rl  # then paths need not be sampled
        count = math.ceil(objective.share * query.shape[1])  # queries that read all leaves, too
        found = self.attention(
            query,
            memory,
            None if taught else draws.noise,
            draws.choices,
            budget=draws.budget,
            leaves=count,
            sample=False if taught else None,
            check=False,
        )
        raw = self.head.net(torch.cat([found.output, found.leaves], dim=1))
        dist, full = self.head.distribution(raw[:, : query.shape[1]]), self.head.distribution(raw[:, query.shape[1] :])
        task = self.head.loss(dist, batch.yt)
        if not self.training:  # in evaluation the loss is the task loss alone
            return Loss.only_task(masked_mean(task, batch.target_mask))
        first, truth = slice(count), batch.yt[:, :count]
        mask = None if batch.target_mask is None else batch.target_mask[:, first]
        loss = tree_loss(
            replace(found, log_prob=found.log_prob[:, first], entropy=found.entropy[:, first]),
            task[:, first],
            self.head.loss(full, truth),
            reward_of(self.reward, self.head.distribution(raw[:, first]), truth),
            reward_of(self.reward, full, truth),
            mask=mask,
            config=objective,
            chance=math.log(self.config.out) if self.config.head == "categorical" and self.config.out > 1 else None,
            detours=self._detours(query[:, first], memory, found, draws.choices),
            masses=self._masses(query[:, first], memory) if objective.lambda_mass else None,
            mean=mean,
        )
        if count < query.shape[1]:  # the others have a task loss alone
            rest = masked_mean(task, batch.target_mask) - masked_mean(task[:, first], mask)
            loss = loss._replace(total=loss.total + rest, task=loss.task + rest.detach())
        if memory.plan.depth > self.config.mean_levels:
            return loss
        # A low tree needs no aggregator, yet processes that train together wait for gradients of all weights.
        learned = [part for part in (self.attention.aggregator, self.attention.correction) if part is not None]
        unused = sum(weight.sum() for part in learned for weight in part.parameters())
        return loss._replace(total=loss.total + 0 * unused)

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Tree:
        order, c = None, self.config
        if mask is not None or c.order != "given":
            order = permutation_of(c.order, xc, mask, c.branch, c.axis, c.order_seed)
            # Points are put in order before they are embedded: they are narrower than tokens and need no gradient.
            xc, yc, mask = in_order(xc, order), in_order(yc, order), None if mask is None else in_order(mask, order)
        tree = self.attention.build(self.encoder(self.embed.context(xc, yc), mask), mask, check=False)
        return tree if order is None else replace(tree, order=order)

    def _answer(self, memory: Tree, xt: Targets) -> Distribution:
        return self.head(self.attention(self.embed.query(xt), memory, check=False).output)

    def _heads(self, query: Float[Tensor, "b m d"]) -> Float[Tensor, "b m h e"]:
        return self.attention.block.start(query)[1]

    def _masses(self, query: Float[Tensor, "b m d"], memory: Tree) -> PerQuery:
        """`mass_loss` of the levels that learn."""
        return mass_loss(self._heads(query), memory, max(1, memory.plan.depth - self.config.mean_levels))

    def _detours(
        self, query: Tensor, memory: Tree, found: TreeCrossAttentionResult, choices: Tensor | None
    ) -> Detours | None:
        """Detours of the first queries, those in `query`."""
        if choices is None:
            return None
        first = slice(query.shape[1])
        return find_detours(self._heads(query), memory, found.path[:, first], choices[:, first], 1.0)
