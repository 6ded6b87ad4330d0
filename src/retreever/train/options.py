"""What can be set when training from the command line. Free of torch; the settings of a run are saved as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from retreever.arguments import check_int, reject
from retreever.errors import ConfigError
from retreever.train.config import Schedule, TrainConfig

CopyModel = Literal["tca", "ca", "perceiver-io"]


@dataclass(frozen=True)
class CopySettings:
    """One run on the copy task."""

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
    steps: int = 4_000
    """Optimiser steps."""
    batch: int = 128
    """Sequences per step."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup: int = 500
    """Steps over which the learning rate rises."""
    schedule: Schedule = "cosine"
    """How the learning rate goes on after that."""
    clip: float = 1.0
    """Largest gradient norm; 0 leaves gradients as they are."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    evaluate_every: int = 250
    """Steps between looks at the validation set."""
    stop_at: float | None = None
    """Stop early once validation accuracy reaches this many per cent."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept besides the best."""

    def train_config(self, seed: int) -> TrainConfig:
        """The training settings of one seed."""
        shared = {f.name: getattr(self, f.name) for f in fields(TrainConfig) if hasattr(self, f.name)}
        config = TrainConfig(**shared, seed=seed)
        return config.as_published() if self.preset == "paper" else config

    def to_json(self, seed: int) -> dict[str, Any]:
        """The settings of one run, as saved in its folder."""
        return {"task": "copy", "seed": seed, **asdict(self)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> tuple[CopySettings, int]:
        """Settings and seed back from a run folder."""
        rest = {key: value for key, value in saved.items() if key not in ("task", "seed")}
        try:
            return cls(**rest), int(saved["seed"])
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
