"""ReTreever: any encoder, Tree Cross Attention, a head (paper, section 3.4). Without encoder it is TCA alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.attention import TreeCrossAttention
from retreever.batch import Batch, without_padding
from retreever.detours import find_detours, with_detours
from retreever.models.config import ModelConfig, embedding, encoder, head, resolve
from retreever.models.inputs import check_context, check_queries, take_targets
from retreever.objective import (
    REWARDS,
    Baseline,
    Loss,
    ObjectiveConfig,
    Reward,
    RewardFunction,
    gate_of,
    masked_mean,
    reward_of,
    three_term_loss,
)
from retreever.ops.api import IMPLS, Impl
from retreever.results import Retrieval, TreeCrossAttentionResult
from retreever.tree.aggregate import AGGREGATORS, Aggregator
from retreever.tree.build import Tree, plan_for
from retreever.tree.order import ORDERS, Order, in_order, leaf_order
from retreever.tree.plan import TreePlan


@dataclass(frozen=True)
class ReTreeverConfig(ModelConfig):
    """Settings of ReTreever.

    Attributes:
        branch: children per tree node.
        aggregator: how nodes summarise children.
        detach: cut gradients between tree levels.
        order: how tokens are laid on the leaves; "given" for sequences already in order.
        axis: coordinate of the order "axis".
        order_seed: of the orders "random" and "projection".
        retrieval: "policy" searches the tree; "full" reads all leaves with the same weights.
        impl: backend of the operator.
        objective: the three-term loss.
    """

    branch: int = 2
    aggregator: Aggregator = "transformer"
    detach: bool = False
    order: Order = "kd"
    axis: int = 0
    order_seed: int = 0
    retrieval: Retrieval = "policy"
    impl: Impl = "auto"
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("branch", self.branch, 2)
        check_choice("aggregator", self.aggregator, AGGREGATORS)
        check_choice("order", self.order, ORDERS)
        check_choice("impl", self.impl, IMPLS)
        check_int("order_seed", self.order_seed, 0)
        check_bool("detach", self.detach)
        if not isinstance(self.objective, ObjectiveConfig):
            reject("objective", "an ObjectiveConfig", type(self.objective).__name__)

    def as_published(self) -> ReTreeverConfig:
        """The `paper` preset: the choices of the paper's public code where this library's defaults differ.

        Detached tree levels, residuals on normalised inputs with the query added twice, raw keys and values, no gate,
        no detours, and no reward baseline except minus log of the number of classes for the cross-entropy reward.
        """
        cross_entropy = self.objective.reward == "cross-entropy"
        constant = -math.log(self.out) if cross_entropy else 0.0
        baseline: Baseline = "constant" if cross_entropy else "none"
        objective = replace(self.objective, baseline=baseline, constant=constant, gate="open", detours=0.0)
        return replace(self, detach=True, residual="doubled", objective=objective)


class ReTreever(nn.Module):
    """Encoder, tree, search, head. `reward` may be a name or any function (distribution, truth) -> (b, m).

    `mean_over_processes` is what training among several processes sets: the mean of a tensor over all of them.
    """

    mean_over_processes: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)

    def __init__(
        self, config: ReTreeverConfig | None = None, *, reward: Reward | RewardFunction | None = None, **fields: Any
    ) -> None:
        super().__init__()
        self.config = resolve(ReTreeverConfig, config, fields)
        c = self.config
        self.embed, self.encoder, self.head = embedding(c), encoder(c), head(c)
        self.attention = TreeCrossAttention(
            c.dim,
            c.heads,
            c.branch,
            hidden=c.hidden,
            aggregator=c.aggregator,
            detach=c.detach,
            retrieval=c.retrieval,
            residual=c.residual,
            dropout=c.dropout,
            impl=c.impl,
        )
        natural: dict[str, Reward] = {"categorical": "accuracy", "point": "squared-error"}
        default = natural.get(c.head, "log-likelihood")
        if reward is not None and not callable(reward):
            check_choice("reward", reward, REWARDS)
        self.reward: Reward | RewardFunction = reward or c.objective.reward or default

    def encode(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Tree:
        """Order and encode a context and build its tree once; `answer` it as often as wanted."""
        check_context(self.config, self.attention.block.to_q.weight, xc, yc, mask)
        tokens = self.embed.context(without_padding(xc, mask), without_padding(yc, mask))
        if mask is not None or self.config.order != "given":
            order = self.leaf_order(xc, mask)
            tokens, mask = in_order(tokens, order), None if mask is None else in_order(mask, order)
        return self.attention.build(self.encoder(tokens, mask), mask)

    def leaf_order(self, xc: Float[Tensor, "b n dx"], mask: Bool[Tensor, "b n"] | None = None) -> Int[Tensor, "b n"]:
        """Which context point comes where on the leaves: token i in leaf order is point [row, i], real ones first."""
        c = self.config
        return leaf_order(c.order, xc, mask, branch=c.branch, axis=c.axis, seed=c.order_seed)

    def search(
        self,
        memory: Tree,
        xt: Float[Tensor, "b m dx"],
        noise: Float[Tensor, "b m depth"] | None = None,
    ) -> TreeCrossAttentionResult:
        """The search behind the predictions at `xt`: paths, selected nodes, probabilities."""
        if not isinstance(memory, Tree):
            reject("memory", "a Tree made by encode()", type(memory).__name__)
        check_queries(self.config, self.attention.block.to_q.weight, xt, memory.keys.shape[0])
        return self.attention(self.embed.query(xt), memory, noise)

    def answer(self, memory: Tree, xt: Float[Tensor, "b m dx"]) -> Distribution:
        """Predictions at `xt` from a prepared context."""
        return self.head(self.search(memory, xt).output)

    def predict(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        xt: Float[Tensor, "b m dx"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Distribution:
        """Predictions at `xt` given context points (xc, yc); `mask` is True where a context point is real."""
        return self.answer(self.encode(xc, yc, mask), xt)

    def noise_for(self, batch: Batch, generator: torch.Generator) -> Float[Tensor, "b m depth"]:
        """What fixes the paths of `loss`, detours among them: one number per query and decision."""
        plan = plan_for(batch.xc.shape[1], self.config.branch, batch.context_mask)
        shape = (*batch.xt.shape[:2], plan.depth)
        noise = torch.rand(shape, generator=generator, device=generator.device).to(batch.xt.device)
        objective = self.config.objective
        if not (objective.detours and objective.lambda_rl):  # a search that is not trained is not taught by detours
            return noise
        return with_detours(noise, objective.detours, self.config.branch, generator)

    def loss(self, batch: Batch, noise: Float[Tensor, "b m depth"] | None = None) -> Loss:
        """The three-term loss, mean over real targets.

        `noise`, made by `noise_for`, fixes the sampled paths, detours among them; without it paths are sampled afresh
        and no detours are made.
        """
        (xt, yt), mask = take_targets(self.config, batch), batch.target_mask
        memory = self.encode(batch.xc, batch.yc, batch.context_mask)
        check_queries(self.config, self.attention.block.to_q.weight, xt, memory.keys.shape[0])
        query = self.embed.query(xt)
        found, over_leaves = self.attention.with_leaves(query, memory, noise)
        both = self.head.net(torch.cat([found.output, over_leaves]))
        dist, full = (self.head.distribution(raw) for raw in both.chunk(2))
        task, leaves = self.head.loss(dist, yt), self.head.loss(full, yt)
        if not self.training:  # what is reported while evaluating is the task loss alone
            return Loss.only_task(masked_mean(task, mask))
        gate, weight = self._gates(task, leaves, mask)
        detours = None
        if self.config.objective.detours and noise is not None:
            detours = find_detours(self.attention.block.start(query)[1], memory, found.path, noise, weight)
        return three_term_loss(
            self.config.objective,
            task=task,
            leaves=leaves,
            log_prob=found.log_prob,
            entropy=found.entropy / max(1, memory.plan.depth),
            reward=reward_of(self.reward, dist, yt).to(task.dtype),
            full_reward=reward_of(self.reward, full, yt).to(task.dtype),
            mask=mask,
            gate=gate,
            detours=detours,
        )

    def _gates(
        self, task: Float[Tensor, "b m"], leaves: Float[Tensor, "b m"], mask: Tensor | None
    ) -> tuple[Tensor | float, Tensor | float]:
        """How much the search counts so far, the same in all processes, and how much a detour of each query does.

        A detour counts as far as its query can be read from all leaves and the search has come by itself: before that,
        what a random turn reads is chance, and to imitate it makes all children alike.
        """
        objective = self.config.objective
        if objective.gate == "open" or not objective.lambda_ca or self.config.head != "categorical":
            return 1.0, 1.0
        chance = math.log(self.config.out)
        means = torch.stack([masked_mean(loss.detach(), mask) for loss in (leaves, task)])
        gate, found = gate_of(self.mean_over_processes(means), chance).unbind()
        return gate, found * gate_of(leaves, chance)

    def tokens(self, n: int) -> int:
        """Tokens each query attends to when the context has `n` (the paper's convention)."""
        return n if self.config.retrieval == "full" else TreePlan(n, self.config.branch).tokens
