"""The recipe for one's own data: train attention over all tokens, convert it, and train on with the tree.

Attention over all tokens learns fastest, since every token is a signal for every query. Read through a tree of means it
loses little under a budget of a few per cent of the tokens. The second stage teaches the nodes what attention knows
(`mass_loss`). All other weights stay as they are, so that the reading of all tokens, and with it that of large budgets,
is as good as before; training them on made it worse by half on fields of 512 points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

from retreever.arguments import check_choice, check_number, reject
from retreever.models.retreever import ReTreever
from retreever.models.retreever_loss import node_weights
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.train.config import TrainConfig
from retreever.train.fitting import fit
from retreever.train.protocols import Record, Task

Learn = Literal["nodes", "all"]
TAUGHT = ObjectiveConfig(lambda_rl=0.0, lambda_mass=0.1, share=0.25)


def fit_staged(
    model: TransformerCA,
    data: Task | Iterable[Any],
    config: TrainConfig | None = None,
    *,
    first: float = 0.9,
    budgets: int = 0,
    learn: Learn = "nodes",
    objective: ObjectiveConfig = TAUGHT,
    tree: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[ReTreever, list[Record]]:
    """Train `model`, convert it, train on; returns the model with a tree and the validation history of both stages.

    Args:
        model: with attention over all tokens; it is trained in place.
        data: as `fit` takes them.
        config: of both stages together.
        first: share of the steps of the first stage; 1 ends with the conversion.
        budgets: largest budget in the second stage, 5 % of the tokens for example; 0 trains one path.
        learn: weights that the second stage trains: those of the "nodes", aggregator and correction, or "all".
        objective: of the second stage.
        tree: further settings of `ReTreever.from_transformer_ca`.
        more: further arguments of `fit`.
    """
    if not isinstance(model, TransformerCA):
        reject("model", "a TransformerCA, to be trained first", type(model).__name__)
    check_number("first", first)
    check_choice("learn", learn, get_args(Learn))
    if not 0 < first <= 1:
        reject("first", "a share of the steps, more than 0 and at most 1", first)
    config = config or TrainConfig()
    if more.get("folder") is not None:
        reject("folder", "None, as there are two stages; fit each by itself", more["folder"])
    steps = max(1, round(first * config.steps))
    history = fit(model, data, replace(config, steps=steps, warmup=min(config.warmup, steps)), **more)
    found = ReTreever.from_transformer_ca(model, **{"objective": replace(objective, budgets=budgets), **(tree or {})})
    rest = config.steps - steps
    if rest:
        later = replace(config, steps=rest, lr=config.lr / 2, warmup=min(config.warmup, rest // 10))
        with nullcontext() if learn == "all" else nodes_alone(found):
            records = fit(found, data, later, **more)
        history = [*history, *(replace(record, step=record.step + steps) for record in records)]
    return found, history


@contextmanager
def nodes_alone(model: ReTreever) -> Iterator[None]:
    """Weights other than those of aggregator and correction need no gradient, and are not trained, inside the block."""
    learned = set(map(id, node_weights(model)))
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in learned]
    for weight in others:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in others:
            weight.requires_grad_(True)
