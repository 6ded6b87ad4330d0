"""The recipe for one's own data: train attention over all tokens, convert it, and train on with the tree.

Attention over all tokens learns fastest, since every token is a signal for every query. Read through a tree of means it
loses little under a budget of a few per cent of the tokens. In the second stage the nodes learn, for one path
by what attention knows (`mass_loss`), for a budget by the loss of the task. All other weights stay as they are, so that
the reading of all tokens, and with it that of large budgets, is as good as before.

One path has to be learned by all weights: attention must come to do without tokens beyond the border of a node. Then
the first stage is short, and the second has the three terms of the paper, with a small weight of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from retreever.arguments import check_choice, check_int, check_number, check_path, reject
from retreever.models.retreever import ReTreever
from retreever.models.retreever_loss import node_weights
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.scaler import Scaled
from retreever.train.config import TrainConfig
from retreever.train.fitting import fit
from retreever.train.protocols import Record, Task

Learn = Literal["nodes", "all"]
FIRST: dict[Learn, float] = {"nodes": 0.9, "all": 0.25}
TAUGHT = ObjectiveConfig(lambda_rl=0.0, lambda_mass=0.1, share=0.25)
SEARCHED = ObjectiveConfig(lambda_rl=0.1, lambda_ca=0.3, share=0.25)


def fit_staged(
    model: TransformerCA | Scaled,
    data: Task | Iterable[Any],
    config: TrainConfig | None = None,
    *,
    first: float | None = None,
    budgets: int = 0,
    learn: Learn = "nodes",
    objective: ObjectiveConfig | None = None,
    tree: dict[str, Any] | None = None,
    folder: str | Path | None = None,
    **more: Any,
) -> tuple[Any, list[Record]]:
    """Train `model`, convert it, train on; returns the `ReTreever` and the validation history of both stages.

    Args:
        model: with attention over all tokens, perhaps `Scaled`, as the result is then; it is trained in place.
        data: as `fit` takes them.
        config: of both stages together.
        first: share of the steps of the first stage, 0.9 or, where all weights learn, 0.25; 1 ends with the
            conversion.
        budgets: the budget the model is read with from then on, 5 % of the tokens for example: the second stage reads
            between half of it and all of it, and validates with all of it. 0 is one path.
        learn: weights that the second stage trains: those of the "nodes", aggregator and correction, or "all", which
            is better for one path, with many children per node: `tree={"branch": 16, "mean_levels": 1}`.
        objective: of the second stage, instead of `teaching(budgets, learn)`.
        tree: further settings of `ReTreever.from_transformer_ca`.
        folder: keep checkpoints of both stages there, in "attention" and "tree"; the same call, with a fresh model,
            goes on after an interruption.
        more: further arguments of `fit`.
    """
    attention = model.model if isinstance(model, Scaled) else model
    if not isinstance(attention, TransformerCA):
        reject("model", "a TransformerCA, to be trained first", type(attention).__name__)
    check_choice("learn", learn, get_args(Learn))
    first = FIRST[learn] if first is None else first
    check_number("first", first)
    check_int("budgets", budgets, 0)
    if not 0 < first <= 1:
        reject("first", "a share of the steps, more than 0 and at most 1", first)
    config = config or TrainConfig()
    if folder is not None:
        check_path("folder", folder)
    if not isinstance(tree, dict | None):
        reject("tree", "a dict of settings of the tree", type(tree).__name__)
    chosen = teaching(budgets, learn) if objective is None else replace(objective, budgets=budgets)
    settings: dict[str, Any] = {"objective": chosen, "budget": budgets or None, **(tree or {})}
    _converted(attention, settings, config)  # refuses settings before anything is trained
    if more.get("validation") is not None:
        more["validation"] = list(more["validation"])  # both stages look at it
    steps = max(1, round(first * config.steps))
    earlier = replace(config, steps=steps, warmup=min(config.warmup, steps))
    history = fit(model, data, earlier, folder=_part(folder, "attention"), **more)
    found = _converted(attention, settings, config)
    whole = Scaled(found, model.scaler) if isinstance(model, Scaled) else found
    rest = config.steps - steps
    if rest:
        rate = config.lr if learn == "all" else config.lr / 2
        later = replace(config, steps=rest, lr=rate, warmup=min(config.warmup, rest // 10))
        with nullcontext() if learn == "all" else nodes_alone(found):
            records = fit(whole, data, later, folder=_part(folder, "tree"), **more)
        history = [*history, *(replace(record, step=record.step + steps) for record in records)]
    return whole, history


def _converted(attention: TransformerCA, settings: dict[str, Any], config: TrainConfig) -> ReTreever:
    """The tree, with the same new weights in every run of a seed, interrupted or not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return ReTreever.from_transformer_ca(attention, **settings)


def _part(folder: str | Path | None, stage: str) -> Path | None:
    """The folder of one stage."""
    return None if folder is None else Path(folder) / stage


def teaching(budgets: int, learn: Learn = "nodes") -> ObjectiveConfig:
    """Objective of the second stage.

    Where the nodes alone learn, `mass_loss` for one path, the loss of the task alone for a budget. On fields of 4,096
    points, 81 of them read, the error was 1.03 times that of all tokens with the means, 1.17 times with `mass_loss` and
    one path in half of the steps, and 1.01 times as here. Where all weights learn, the three terms: `mass_loss` is
    least where attention is uniform, and would make it so (error 0.92 where all tokens had 0.08).
    """
    if learn == "all":
        return replace(SEARCHED, budgets=budgets)
    return replace(TAUGHT, budgets=budgets, lambda_mass=0.0) if budgets else TAUGHT


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
