"""Models as plain data: the kind and its settings, from which a model for saved weights is built."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from retreever.errors import ConfigError
from retreever.models.base import Model
from retreever.models.bnp import BANP, BNP
from retreever.models.cmanp import CMANP, CMANPConfig
from retreever.models.cnp import CANP, CNP
from retreever.models.config import AnyConfig, ModelConfig
from retreever.models.lbanp import LBANP, LBANPConfig
from retreever.models.neural_process import NPConfig
from retreever.models.np import ANP, NP
from retreever.models.perceiver_io import PerceiverIO, PerceiverIOConfig
from retreever.models.retreever import ReTreever
from retreever.models.retreever_config import ReTreeverConfig
from retreever.models.series.kinds import SERIES
from retreever.models.tnp import TNPD, TNPDConfig
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig

KINDS: dict[str, tuple[type[Model], type[AnyConfig]]] = {
    "ReTreever": (ReTreever, ReTreeverConfig),
    "TransformerCA": (TransformerCA, ModelConfig),
    "PerceiverIO": (PerceiverIO, PerceiverIOConfig),
    **{kind.__name__: (kind, NPConfig) for kind in (CNP, CANP, NP, ANP, BNP, BANP)},
    "TNPD": (TNPD, TNPDConfig),
    "LBANP": (LBANP, LBANPConfig),
    "CMANP": (CMANP, CMANPConfig),
    **{kind.__name__: (kind, kind.settings) for kind in SERIES.values()},
}


def model_to_json(model: Model) -> dict[str, Any]:
    """The kind and all settings of a model, for `model_from_json`."""
    kind = type(model).__name__
    if kind not in KINDS:
        raise ConfigError(f"model: expected one of {', '.join(KINDS)}, got {kind}")
    return {"kind": kind, **asdict(model.config)}


def model_from_json(saved: dict[str, Any]) -> Model:
    """A freshly initialised model of the kind and settings in `saved`."""
    kind = saved.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    model_type, config_type = KINDS[kind]
    values = {name: value for name, value in saved.items() if name != "kind"}
    known = {f.name for f in fields(config_type)}
    for name in values:
        if name not in known:
            raise ConfigError(f"{name}: expected a setting of {kind}, got another")
    try:
        if "objective" in values:
            values["objective"] = ObjectiveConfig(**values["objective"])
        config: Any = config_type(**values)
    except TypeError as error:
        raise ConfigError(f"objective: expected settings of the objective, got {error}") from None
    build: Any = model_type
    return build(config)
