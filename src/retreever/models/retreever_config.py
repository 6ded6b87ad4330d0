"""Settings of ReTreever."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from retreever.arguments import check_bool, check_choice, check_int, reject
from retreever.attention_inputs import check_budget
from retreever.models.config import ModelConfig
from retreever.objective import Baseline, ObjectiveConfig
from retreever.results import RETRIEVALS, Retrieval
from retreever.tree.aggregate import AGGREGATORS, Aggregator
from retreever.tree.order import ORDERS, Order


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
        budget: how many tokens a query may read, one path at least; None reads one path.
        correct: nodes are means of keys and values with a learned correction; see `TreeCrossAttention`.
        mean_levels: lowest levels whose nodes are means, without aggregator or correction.
        log_count: add the logarithm of its number of tokens to the score of a node.
        objective: the three-term loss.
    """

    branch: int = 2
    aggregator: Aggregator = "transformer"
    detach: bool = False
    order: Order = "kd"
    axis: int = 0
    order_seed: int = 0
    retrieval: Retrieval = "policy"
    budget: int | None = None
    correct: bool = False
    mean_levels: int = 0
    log_count: bool = False
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("branch", self.branch, 2)
        check_choice("aggregator", self.aggregator, AGGREGATORS)
        check_choice("order", self.order, ORDERS)
        check_choice("retrieval", self.retrieval, RETRIEVALS)
        check_budget(self.budget)
        check_int("order_seed", self.order_seed, 0)
        check_int("mean_levels", self.mean_levels, 0)
        for name in ("detach", "correct", "log_count"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.objective, ObjectiveConfig):
            reject("objective", "an ObjectiveConfig", type(self.objective).__name__)

    def as_published(self) -> ReTreeverConfig:
        """The config of the `paper` preset: as in the paper's public code where this library's defaults differ.

        Detached tree levels, residuals on normalised inputs with the query added twice, raw keys and values, no gate,
        no detours, and no reward baseline except minus log of the number of classes for the cross-entropy reward.
        """
        cross_entropy = self.objective.reward == "cross-entropy"
        constant = -math.log(self.out) if cross_entropy else 0.0
        baseline: Baseline = "constant" if cross_entropy else "none"
        objective = replace(self.objective, baseline=baseline, constant=constant, gate="open", detours=0.0)
        return replace(self, detach=True, residual="doubled", objective=objective)
