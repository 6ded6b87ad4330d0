"""Training: `fit` a model on a task in memory, or keep runs in folders that can be stopped and resumed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "RunFolder": "run",
    "Stopped": "together",
    "TrainConfig": "config",
    "Trainer": "engine",
    "evaluate": "score",
    "fit": "fitting",
    "fit_staged": "staged",
    "train_in": "together",
}
__all__ = ["RunFolder", "Stopped", "TrainConfig", "Trainer", "evaluate", "fit", "fit_staged", "train_in"]


def __getattr__(name: str) -> Any:
    """Public names, loaded on first use: the command line reads settings without loading torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
