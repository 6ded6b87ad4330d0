"""Models of the recipes: their settings, and `make_model`, which alone imports torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from retreever.arguments import reject

if TYPE_CHECKING:  # torch is imported only when a model is made
    from retreever.models.base import Model

Order = Literal["given", "axis", "kd", "kd-widest", "ball", "principal", "random", "projection"]
KINDS = {"tca": "retreever", "ca": "transformer-ca"}  # names of the copy task for models without an encoder
POINT_MODELS = ("retreever", "transformer-ca", "perceiver-io")
NEURAL_PROCESSES = ("cnp", "canp", "np", "anp", "bnp", "banp", "tnpd", "lbanp", "cmanp")
SERIES = (
    "rnn-impute", "rnn-decay", "grud", "ip-nets", "seft", "ode-rnn", "latent-ode-rnn", "latent-ode", "mtand-enc",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSettings:
    """A model and its sizes."""

    model: Literal[
        "retreever", "transformer-ca", "perceiver-io", "tca", "ca",
        "cnp", "canp", "np", "anp", "bnp", "banp", "tnpd", "lbanp", "cmanp",
        "rnn-impute", "rnn-decay", "grud", "ip-nets", "seft", "ode-rnn", "latent-ode-rnn", "latent-ode", "mtand-enc",
    ] = "retreever"  # fmt: skip
    """Tree cross attention, cross attention over all tokens, or Perceiver IO, behind the same kind of encoder; without
    an encoder, on the copy task, the first two are tca and ca. GP regression and images also have nine neural
    processes, cnp to cmanp; activity has nine models of time series, rnn-impute to mtand-enc."""
    layers: int = 6
    """Encoder layers; cnp to banp have the published depths."""
    dim: int = 64
    """Width of all tokens."""
    hidden: int = 128
    """Width of feed-forward layers."""
    dropout: float = 0.0
    """Dropout; cnp to banp and tnpd have none."""
    residual: Literal["auto", "pre", "normalised"] = "auto"
    """Residuals around the norm, or on normalised inputs as in the paper's code; auto is what trains best: around the
    norm for Perceiver IO, lbanp and on the copy task, else normalised."""
    latents: int = 0
    """Latents of Perceiver IO, lbanp and cmanp; 0 takes as many as the tree reads tokens, or as published."""
    order: Order = "kd"
    """Order of the tokens on the leaves."""
    axis: int = 0
    """The coordinate of --order axis."""
    state: int = 0
    """Width of the state of a model of time series, instead of layers, dim and hidden; 0 takes the published one. Of
    ode-rnn all layers are as wide then, three of them in its ODE."""
    solver: Literal["fixed", "adaptive"] = "fixed"
    """Steps of latent ODEs: a fixed number, or chosen by their error (torchdiffeq), without a CUDA graph."""


@dataclass(frozen=True)
class SearchSettings:
    """The tree and how its search is trained."""

    branch: int = 2
    """Children per tree node."""
    budget: int | None = None
    """Tokens a query may read, one path at least; None reads one path."""
    reward: Literal["log-likelihood", "squared-error", "accuracy", "cross-entropy"] = "log-likelihood"
    """Reward of the tree search."""
    lambda_rl: float = 1.0
    """Weight of the policy's loss."""
    lambda_ca: float = 1.0
    """Weight of the loss read over all leaves."""
    gate: Literal["leaves", "open"] = "leaves"
    """For classes, weight the loss of the search by the progress of reading all leaves, or always by 1."""
    detours: float = 0.0
    """Share of the queries that make one decision of the search at random while training."""


def check_used(model: ModelSettings, search: SearchSettings, usual: tuple[ModelSettings, SearchSettings]) -> None:
    """Refuse settings that differ from the `usual` ones although the model has no use for them."""
    given = vars(model) | vars(search)
    for name, default in (vars(usual[0]) | vars(usual[1])).items():
        if name not in _used(model.model) and given[name] != default:
            reject(name, f"{default}, as {model.model} has no use for it", repr(given[name]))


def _used(model: str) -> set[str]:
    """The settings that a model reads, its name among them."""
    tree = {field.name for field in fields(SearchSettings)} | {"order", "axis"}
    blocks = {"model", "layers", "dim", "hidden", "dropout", "residual"}
    if model in SERIES:
        return {"model", "state", "dropout"} | ({"solver"} if model.startswith("latent-ode") else set())
    if model in ("lbanp", "cmanp"):
        return blocks | {"latents"}
    if model in NEURAL_PROCESSES:
        return {"model", "dim", "dropout"} | ({"layers", "hidden"} if model == "tnpd" else set())
    kinds = {"retreever": tree, "transformer-ca": set(), "perceiver-io": {"latents", "branch"}}
    return blocks | kinds[KINDS.get(model, model)]


def make_model(
    model: ModelSettings, search: SearchSettings, task_fields: dict[str, Any], context: int, published: bool
) -> Model:
    """A freshly initialised model for a task with contexts of at most `context`; `task_fields` follow from the task.

    `published` takes the choices of the paper's code; gate and detours stay as in `search`.
    """
    from retreever.models.config import ModelConfig
    from retreever.models.perceiver_io import PerceiverIO, PerceiverIOConfig
    from retreever.models.retreever import ReTreever
    from retreever.models.retreever_config import ReTreeverConfig
    from retreever.models.transformer_ca import TransformerCA
    from retreever.objective import ObjectiveConfig
    from retreever.tree.plan import TreePlan

    sizes = {name: getattr(model, name) for name in ("layers", "dim", "hidden", "dropout", "residual")}
    shared = task_fields | sizes | ({"encoder": "identity"} if model.model in KINDS else {})
    kind = KINDS.get(model.model, model.model)
    if kind == "transformer-ca":
        return TransformerCA(ModelConfig(**shared))
    if kind == "perceiver-io":
        latents = model.latents or TreePlan(context, search.branch).tokens
        return PerceiverIO(PerceiverIOConfig(**shared, latents=latents))
    objective = ObjectiveConfig(reward=search.reward, lambda_rl=search.lambda_rl, lambda_ca=search.lambda_ca)
    tree: Any = {"order": model.order, "axis": model.axis, "branch": search.branch, "budget": search.budget}
    config = ReTreeverConfig(**shared, **tree, objective=objective)
    if published:
        config = config.as_published()
    objective = replace(config.objective, gate=search.gate, detours=search.detours)
    residual: Any = config.residual if model.residual == "normalised" else model.residual
    return ReTreever(replace(config, objective=objective, residual=residual))


def make_neural_process(model: ModelSettings, task_fields: dict[str, Any], depths: dict[str, int]) -> Model:
    """A freshly initialised neural process; `task_fields` and the `depths` of cnp to banp follow from the task."""
    from retreever.models.neural_process import NPConfig
    from retreever.models.saved import KINDS as CLASSES

    kind, config = CLASSES[model.model.upper()]
    known = {field.name for field in fields(config)}
    if model.dropout and "dropout" not in known:
        reject("dropout", f"0, as {model.model} has none", model.dropout)
    sizes = {name: getattr(model, name) for name in ("layers", "dim", "hidden", "dropout", "residual")}
    if model.latents:
        sizes |= {"latents": model.latents, "block_latents": model.latents}
    if issubclass(config, NPConfig):
        sizes |= {**depths, "head": "floored", "heads": NPConfig.heads}
    settings: Any = {name: value for name, value in {**task_fields, **sizes}.items() if name in known}
    build: Any = kind
    return build(config(**settings))


def make_series_model(model: ModelSettings, task_fields: dict[str, Any]) -> Model:
    """A freshly initialised model of time series, of its published sizes unless `state` is given."""
    from retreever.models.series.kinds import SERIES as kinds

    given: dict[str, Any] = task_fields | {"dropout": model.dropout}
    if model.state:
        given["hidden"] = model.state
    if model.state and model.model == "ode-rnn":
        given |= {"layers": 1, "units": model.state, "gru_units": model.state}
    if model.model.startswith("latent-ode"):
        given["solver"] = model.solver
    return kinds[model.model](**given)


def model_mark(model: ModelSettings, search: SearchSettings, natural_order: Order) -> str:
    """The part of a run's name that identifies the model: settings that differ from the defaults."""
    searches = KINDS.get(model.model, model.model) == "retreever"
    axis = str(model.axis) if model.order == "axis" else ""
    weights = (("rl", search.lambda_rl), ("ca", search.lambda_ca))
    marks = (
        model.model,
        str(model.latents) if model.latents else "",
        str(model.state) if model.state else "",
        model.solver if model.solver != "fixed" else "",
        "ce" if searches and search.reward == "cross-entropy" else "",
        f"{model.order}{axis}" if model.order != natural_order else "",
        f"branch{search.branch}" if search.branch != 2 else "",
        f"budget{search.budget}" if searches and search.budget else "",
        *(f"{name}{value:g}" for name, value in weights if value != 1),
    )
    return "-".join(mark for mark in marks if mark)
