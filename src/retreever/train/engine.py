"""The training loop: sample, step, look at validation now and then, stop early when told to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.errors import RetreeverError
from retreever.objective import Loss
from retreever.train.config import TrainConfig


class Model(Protocol):
    """What training needs of a model: an `nn.Module` with `predict` and `loss`."""

    training: bool

    def predict(self, xc: Tensor, yc: Tensor, xt: Tensor, mask: Tensor | None = None) -> Distribution:
        """Predictions at `xt`."""
        ...

    def loss(self, batch: Batch) -> Loss:
        """Training loss."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As of `nn.Module`."""
        ...

    def to(self, device: str) -> Any:
        """As of `nn.Module`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of `nn.Module`."""
        ...


class Task(Protocol):
    """What training needs of a task: fresh batches, fixed validation batches, a metric per query."""

    def training(self, seed: int) -> torch.Generator:
        """The stream training data comes from."""
        ...

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """A fresh batch."""
        ...

    def validation(self) -> Iterator[Batch]:
        """Fixed batches to steer by."""
        ...

    def metric(self, dist: Distribution, batch: Batch) -> Tensor:
        """One value per query (b, m); higher is better."""
        ...


@dataclass(frozen=True)
class Record:
    """One look at the validation set."""

    step: int
    metric: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    metric: float | None
    seconds: float


Watcher = Callable[[Progress], None]


def fit(
    model: Model, task: Task, config: TrainConfig, *, device: str = "cpu", watch: Watcher | None = None
) -> list[Record]:
    """Train `model` on `task` in place and return its validation history.

    The same model, task and config give the same bits on the same machine: sampled paths and dropout come from torch's
    generator, seeded here, and data from the task's own stream.
    """
    torch.manual_seed(config.seed)
    stream = task.training(config.seed)
    model.to(device)
    model.train()
    optimiser, schedule = make_optimiser(model, config)
    history: list[Record] = []
    started = time.perf_counter()
    for step in range(1, config.steps + 1):
        loss = _step(model, task.sample(config.batch, stream, device), optimiser, config)
        _check_loss(loss, step)
        schedule.step()
        if step % config.evaluate_every == 0 or step == config.steps:
            value = evaluate(model, task, task.validation(), device)
            history.append(Record(step, value, float(loss.task), time.perf_counter() - started))
        if watch is not None:
            metric = history[-1].metric if history else None
            watch(Progress(step, config.steps, float(loss.task), metric, time.perf_counter() - started))
        if config.stop_at is not None and history and history[-1].metric >= config.stop_at:
            break
    return history


def evaluate(model: Model, task: Task, batches: Iterable[Batch], device: str = "cpu") -> float:
    """Mean of the task's metric over all real targets of `batches`; greedy, without gradients or dropout."""
    was_training = model.training
    model.train(False)
    total, count = 0.0, 0
    with torch.inference_mode():
        for cpu_batch in batches:
            batch = cpu_batch.to(device)
            dist = model.predict(batch.xc, batch.yc, batch.xt, batch.context_mask)
            values = task.metric(dist, batch)
            real = values if batch.target_mask is None else values[batch.target_mask]
            total, count = total + float(real.double().sum()), count + real.numel()
    model.train(was_training)
    return total / count


def make_optimiser(
    model: Model, config: TrainConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Adam (AdamW when there is weight decay) and its learning-rate schedule."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate(config, step))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Fraction of the peak rate at `step` (0-based): linear warm-up, then cosine to 0 or constant."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def as_rows(history: list[Record], metric: str = "metric") -> list[dict[str, float]]:
    """Plain dictionaries, for JSON and figures; the metric goes by the name `metric`."""
    return [{"step": r.step, metric: r.metric, "loss": r.loss, "seconds": r.seconds} for r in history]


def _step(model: Model, batch: Batch, optimiser: torch.optim.Optimizer, config: TrainConfig) -> Loss:
    loss = model.loss(batch)
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss.total)
    if config.clip:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimiser.step()
    return loss


def _check_loss(loss: Loss, step: int) -> None:
    """Stop by name when a term is no longer a number."""
    if math.isfinite(float(loss.total.detach())):
        return
    for name, value in loss._asdict().items():
        if not math.isfinite(float(value.detach())):
            raise RetreeverError(f"training stopped at step {step}: the loss term '{name}' is {float(value.detach())}")
