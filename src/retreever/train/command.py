"""What `retreever train` and `retreever eval` do: settings in, run folders and printed results out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retreever.checks import find_device
from retreever.errors import CheckpointError
from retreever.models.config import ModelConfig
from retreever.models.perceiver_io import PerceiverIO, PerceiverIOConfig
from retreever.models.retreever import ReTreever, ReTreeverConfig
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.tasks.copy import VOCABULARY, CopyTask
from retreever.tasks.seeds import derive_seed
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint
from retreever.train.distributed import Ranks, ranks_of_job
from retreever.train.engine import ALONE, Trainer, evaluate
from retreever.train.log import ProgressLine
from retreever.train.options import CopySettings, Evaluate, TrainCopy
from retreever.train.resume import train_in
from retreever.train.run import RunFolder
from retreever.train.state import restore_model
from retreever.tree.plan import TreePlan
from retreever.version import __version__

CopyModels = TransformerCA | ReTreever | PerceiverIO


def copy_model(settings: CopySettings) -> CopyModels:
    """The model of a copy run, freshly initialised."""
    shared: dict[str, Any] = {
        "dim_y": VOCABULARY,
        "inputs": "sequence",
        "head": "categorical",
        "dropout": settings.dropout,
        "residual": "normalised" if settings.preset == "paper" else "pre",
    }
    if settings.model == "ca":
        return TransformerCA(ModelConfig(**shared, encoder="identity"))
    if settings.model == "perceiver-io":
        latents = settings.latents or TreePlan(settings.n // 2, settings.branch).tokens
        return PerceiverIO(PerceiverIOConfig(**shared, latents=latents))
    objective = ObjectiveConfig(reward=settings.reward)
    tree: dict[str, Any] = {"encoder": "identity", "order": "given", "branch": settings.branch, "objective": objective}
    config = ReTreeverConfig(**shared, **tree)
    return ReTreever(config.as_published() if settings.preset == "paper" else config)


def train_copy(options: TrainCopy) -> None:
    """Train every seed in its own folder, one after another; refuse before any work is done."""
    with ranks_of_job(str(find_device(options.device))) as (ranks, device):
        _train_seeds(options, CopyTask(options.n), ranks, device)


def _train_seeds(options: TrainCopy, task: CopyTask, ranks: Ranks, device: str) -> None:
    shared = {f.name: getattr(options, f.name) for f in fields(CopySettings)}
    settings = [CopySettings(**{**shared, "seed": seed}) for seed in options.seeds]
    runs = [(one, RunFolder(run_path(options, one.seed))) for one in settings]
    for one in settings:  # impossible settings are refused before any file is made
        ranks.check(one.train_config().batch)
        copy_model(one)
    for one, folder in runs:
        if ranks.first:
            folder.start(one.to_json(), options.resume, options.overwrite)
    for one, folder in runs:
        result = train_one(one, folder, task, device, ranks)
        if ranks.first:
            tokens = f"{result['tokens']} of {task.context} tokens"
            print(f"{folder.path}: test accuracy {result['test']:.2f} % with {tokens}")


def train_one(
    settings: CopySettings, folder: RunFolder, task: CopyTask, device: str, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """One run from start, or from where it was, to its result."""
    torch.manual_seed(derive_seed("copy", "init", settings.seed))
    model = copy_model(settings)
    trainer = Trainer(model, task, settings.train_config(), device, ranks)
    with ProgressLine(folder.path.name, every=250 if ranks.first else 0) as line:
        history = train_in(folder, trainer, line)
    result = {
        "test": evaluate(model, task, task.test(), device),
        "validation": history[-1].metric,
        "metric": "accuracy in %",
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 2),
        "tokens": model.tokens(task.context),
        "context": task.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "hardware": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
        "versions": {"retreever": __version__, "torch": torch.__version__},
    }
    if ranks.first:
        folder.finish(result)
    return result


def run_path(options: TrainCopy, seed: int) -> Path:
    """Where the run of one seed lives."""
    reward = "-ce" if options.model == "tca" and options.reward == "cross-entropy" else ""
    preset = "-paper" if options.preset == "paper" else ""
    return options.out / f"copy-{options.n}-{options.model}{reward}{preset}-seed{seed}"


def evaluate_run(options: Evaluate) -> None:
    """Test score of a run's best or newest weights."""
    folder = RunFolder(options.run_folder)
    settings = CopySettings.from_json(folder.config())
    best = folder.checkpoints / "best"
    path = best if options.checkpoint == "best" else latest_checkpoint(folder.checkpoints)
    if path is None:
        raise CheckpointError(f"{folder.checkpoints}: expected a checkpoint, got none")
    device, task, model = str(find_device(options.device)), CopyTask(settings.n), copy_model(settings)
    tensors, state = load_checkpoint(path)
    module: nn.Module = model
    restore_model(module, tensors, path)
    module.to(device)
    value = evaluate(model, task, task.test(), device)
    print(f"{path}: test accuracy {value:.4f} % after {state['step']} steps, on {task.test_sequences} sequences")
