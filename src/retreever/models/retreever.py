"""ReTreever: an encoder, Tree Cross Attention and a head (paper, section 3.4). Without an encoder it is TCA alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_choice, reject
from retreever.attention import TreeCrossAttention
from retreever.attention_inputs import check_budget
from retreever.batch import Batch
from retreever.models.base import Contexts, Mask, Model, Targets, Values, check_memory
from retreever.models.config import embedding, encoder, head, read_out, resolve
from retreever.models.retreever_config import ReTreeverConfig
from retreever.models.retreever_loss import Draws, loss_with_leaves, make_draws
from retreever.models.stream import encode_points, update_memory
from retreever.models.transformer_ca import TransformerCA
from retreever.nn.encoders import encode_tokens
from retreever.objective import REWARDS, Loss, Reward, RewardFunction
from retreever.results import Retrieval, TreeCrossAttentionResult
from retreever.search_loss import Mean
from retreever.tree.aggregate import Aggregator
from retreever.tree.order import in_order, leaf_order, permutation_of
from retreever.tree.plan import TreePlan
from retreever.tree.value import Tree


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
        trained = asdict(model.config)
        for name, wanted in fields.items():
            if name in trained.keys() - {"dropout", "impl"} and wanted != trained[name]:
                reject(name, f"{trained[name]!r}, as trained", repr(wanted))
        settings = {**trained, "correct": True, "mean_levels": 2, "log_count": True, "dropout": 0.0}
        tree = cls(reward=reward, aggregator=aggregator, **settings | fields)
        tree.to(next(model.parameters()))
        found = tree.load_state_dict(model.state_dict(), strict=False)
        new = ("attention.aggregator.", "attention.correction.")
        assert not found.unexpected_keys and all(name.startswith(new) for name in found.missing_keys), found
        return tree.train(model.training)

    def set_reading(self, retrieval: Retrieval = "policy", budget: int | None = None) -> ReTreever:
        """Change how trees are read from now on, with the same weights; returns the model."""
        if isinstance(retrieval, int):
            reject("retrieval", "policy or full; a number of tokens is budget=", retrieval)
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
        return make_draws(self, batch, generator)

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
        return loss_with_leaves(self, batch, draws or Draws(), mean)

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> Tree:
        order, c = None, self.config
        if mask is not None or c.order != "given":
            order = permutation_of(c.order, xc, mask, c.branch, c.axis, c.order_seed)
            # Points are put in order before they are embedded: they are narrower than tokens and need no gradient.
            xc, yc, mask = in_order(xc, order), in_order(yc, order), None if mask is None else in_order(mask, order)
        tokens = encode_tokens(self.encoder, self.embed.context(xc, yc), mask)
        tree = self.attention.build(tokens, mask, check=False)
        return tree if order is None else replace(tree, order=order)

    def _answer(self, memory: Tree, xt: Targets) -> Distribution:
        return self.head(self.attention(self.embed.query(xt), memory, check=False).output)
