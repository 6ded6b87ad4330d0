"""What can be set when training from the command line. Free of torch; the settings of a run are saved as JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional, Suppress

from retreever.arguments import check_int, reject
from retreever.errors import ConfigError
from retreever.train.config import TrainConfig

CopyModel = Literal["tca", "ca", "perceiver-io"]


@dataclass(frozen=True)
class CopySettings(TrainConfig):
    """One run on the copy task: what is trained, and how."""

    n: int = 256
    """Length of the sequences, a power of two; half of it is context."""
    model: CopyModel = "tca"
    """Tree cross attention, cross attention over all tokens, or Perceiver IO."""
    reward: Literal["accuracy", "cross-entropy"] = "accuracy"
    """What the tree search is rewarded for."""
    latents: int = 0
    """Latents of Perceiver IO; 0 takes as many as the tree reads tokens."""
    branch: int = 2
    """Children per tree node."""
    dropout: float = 0.1
    """Dropout of all models."""
    preset: Literal["default", "paper"] = "default"
    """This library's choices, or those of the paper's public code."""
    seed: Suppress[int] = 0

    def __post_init__(self) -> None:
        """Checked when used: an error raised while arguments are parsed would not be one line."""

    def train_config(self) -> TrainConfig:
        """The training settings alone."""
        config = TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})
        return config.as_published() if self.preset == "paper" else config

    def to_json(self) -> dict[str, Any]:
        """The settings, as saved in the run's folder."""
        own = {f.name: getattr(self, f.name) for f in fields(CopySettings)}
        return {"task": "copy", **own, "betas": list(self.betas)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CopySettings:
        """Settings back from a run folder."""
        rest = {key: value for key, value in saved.items() if key != "task"}
        try:
            return cls(**{**rest, "betas": tuple(rest["betas"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json: expected the settings of a copy run, got {error}") from None


@dataclass(frozen=True)
class TrainCopy(CopySettings):
    """Train on the copy task; each seed has a run folder of its own."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, data and sampled paths; one run each."""
    out: Path = Path("runs")
    """Where run folders go."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    resume: bool = False
    """Go on with runs that were stopped."""
    overwrite: bool = False
    """Replace runs of the same name."""

    def run(self) -> None:
        """Do it."""
        from retreever.train.command import train_copy

        for seed in self.seeds:
            check_int("seeds", seed, 0)
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            reject("seeds", "one or more different seeds", self.seeds)
        if self.resume and self.overwrite:
            reject("resume", "one of --resume and --overwrite", "both")
        train_copy(self)


@dataclass(frozen=True)
class Evaluate:
    """Score a trained run on its test set."""

    run_folder: Positional[Path]
    """Folder of a run."""
    checkpoint: Literal["best", "last"] = "best"
    """Which weights: those that did best on validation, or the newest."""
    device: str = "auto"
    """cpu, cuda, or auto."""

    def run(self) -> None:
        """Do it."""
        from retreever.train.command import evaluate_run

        evaluate_run(self)
