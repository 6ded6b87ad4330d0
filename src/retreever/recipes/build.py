"""Models of the recipes, put together from their settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from retreever.batch import Batch
from retreever.models.config import ModelConfig
from retreever.models.perceiver_io import PerceiverIO, PerceiverIOConfig
from retreever.models.retreever import ReTreever, ReTreeverConfig
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.tasks.copy import VOCABULARY
from retreever.train.protocols import Task
from retreever.tree.plan import TreePlan

if TYPE_CHECKING:
    from retreever.recipes.copy import CopySettings
    from retreever.recipes.points import PointSettings
    from retreever.recipes.settings import Settings

AnyModel = TransformerCA | ReTreever | PerceiverIO


class TestableTask(Task, Protocol):
    """A task with a fixed test set."""

    def test(self) -> Iterator[Batch]:
        """Fixed batches, for the final score alone."""
        ...

    @property
    def test_batches(self) -> int:
        """How many they are."""
        ...


def copy_model(settings: CopySettings) -> AnyModel:
    """The model of a copy run, freshly initialised. It has no encoder (Perceiver IO is one by itself)."""
    shared = {"dim_y": VOCABULARY, "inputs": "sequence", "head": "categorical", "dropout": settings.dropout}
    kind = {"ca": "transformer-ca", "tca": "retreever"}.get(settings.model, settings.model)
    encoder = {} if kind == "perceiver-io" else {"encoder": "identity"}
    return _model(kind, settings, shared | encoder, order="given", reward=settings.reward)


def point_model(settings: PointSettings) -> AnyModel:
    """The model of a run with an encoder, freshly initialised."""
    names = ("dim_x", "dim_y", "outputs", "head", "dim", "hidden", "layers", "dropout")
    shared = {name: getattr(settings, name) for name in names}
    reward = getattr(settings, "reward", None)
    return _model(settings.model, settings, shared, order=settings.order, axis=settings.axis, reward=reward)


def _model(
    kind: str, settings: Settings, shared: dict[str, Any], order: Any, axis: int = 0, reward: Any = None
) -> AnyModel:
    paper = settings.preset == "paper"
    shared |= {"residual": "normalised" if paper else getattr(settings, "residual", "pre")}
    if kind == "transformer-ca":
        return TransformerCA(ModelConfig(**shared))
    if kind == "perceiver-io":
        latents = settings.latents or TreePlan(settings.context, settings.branch).tokens
        return PerceiverIO(PerceiverIOConfig(**shared, latents=latents))
    objective = ObjectiveConfig(reward=reward, lambda_rl=settings.lambda_rl, lambda_ca=settings.lambda_ca)
    config = ReTreeverConfig(**shared, order=order, axis=axis, branch=settings.branch, objective=objective)
    config = config.as_published() if paper else config
    said = replace(config.objective, gate=settings.gate, detours=settings.detours)  # by the preset, or by hand
    return ReTreever(replace(config, objective=said))
