"""The training loop: sample, step, look at validation now and then, stop early when told to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.errors import RetreeverError
from retreever.objective import Loss
from retreever.train.config import TrainConfig
from retreever.train.distributed import Ranks, synchronised

ALONE = Ranks()
PATHS = 0x5EED  # sets the stream of sampled paths apart from that of the data


@runtime_checkable
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


@runtime_checkable
class Searches(Protocol):
    """A model that samples paths; the noise is drawn for it, so that a run can be repeated and shared out."""

    def noise_for(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Noise for the whole batch."""
        ...


@runtime_checkable
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


class Trainer:
    """One run: a model, its optimiser, its random streams and how far it has come.

    The same model, task and config give the same bits on the same machine: sampled paths and dropout come from torch's
    generator, seeded here, and data from the task's own stream.
    """

    def __init__(
        self, model: Model, task: Task, config: TrainConfig, device: str = "cpu", ranks: Ranks = ALONE
    ) -> None:
        ranks.check(config.batch)
        torch.manual_seed(config.seed + ranks.rank)  # dropout; everything else has a stream of its own
        self.model, self.task, self.config, self.device = model, task, config, torch.device(device)
        self.ranks, self.stream = ranks, task.training(config.seed)
        self.paths = torch.Generator(device).manual_seed(self.stream.initial_seed() ^ PATHS)
        model.to(device)
        model.train()
        assert isinstance(model, nn.Module)
        self.loss_of = synchronised(model, ranks)
        self.optimiser = make_optimiser(model, config)
        self.step, self.seconds = 0, 0.0
        self.history: list[Record] = []

    @property
    def done(self) -> bool:
        """Whether the last step is behind it or the metric is where it should be."""
        stop_at = self.config.stop_at
        reached = stop_at is not None and bool(self.history) and self.history[-1].metric >= stop_at
        return reached or self.step >= self.config.steps

    def advance(self) -> Progress:
        """One step, and a look at the validation set when it is time."""
        started, config = time.perf_counter(), self.config
        loss = self.train_step()
        _check_loss(loss, self.step)
        due = self.step % config.evaluate_every == 0 or self.step == config.steps
        value = self._validate() if due else None
        self.seconds += time.perf_counter() - started
        if value is not None:
            self.history.append(Record(self.step, value, self.ranks.mean(loss.task), self.seconds))
        metric = self.history[-1].metric if self.history else None
        return Progress(self.step, config.steps, float(loss.task), metric, self.seconds)

    def train_step(self) -> Loss:
        """Sample, forward, backward, clip, update."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.lr * learning_rate(self.config, self.step)
        batch = self.task.sample(self.config.batch, self.stream, self.device)
        noise = self.model.noise_for(batch, self.paths) if isinstance(self.model, Searches) else None
        mine = self.ranks.rows(self.config.batch)
        loss: Loss = self.loss_of(batch.rows(mine), None if noise is None else noise[mine])
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss.total)
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.step += 1
        return loss

    def _validate(self) -> float:
        first = self.ranks.first
        value = evaluate(self.model, self.task, self.task.validation(), self.device) if first else None
        return self.ranks.from_first(value, self.device)


def fit(
    model: Model, task: Task, config: TrainConfig, *, device: str = "cpu", watch: Watcher | None = None
) -> list[Record]:
    """Train `model` on `task` in place, in memory alone, and return its validation history."""
    trainer = Trainer(model, task, config, device)
    while not trainer.done:
        progress = trainer.advance()
        if watch is not None:
            watch(progress)
    return trainer.history


def evaluate(model: Model, task: Task, batches: Iterable[Batch], device: torch.device | str = "cpu") -> float:
    """Mean over `batches` of the task's metric over their real targets; greedy, without gradients or dropout.

    Batches weigh the same whatever their size: this is how the paper and those before it measure.
    """
    was_training = model.training
    model.train(False)
    means = []
    with torch.inference_mode():
        for cpu_batch in batches:
            batch = cpu_batch.to(device)
            dist = model.predict(batch.xc, batch.yc, batch.xt, batch.context_mask)
            values = task.metric(dist, batch)
            real = values if batch.target_mask is None else values[batch.target_mask]
            means.append(float(real.double().mean()))
    model.train(was_training)
    return sum(means) / len(means)


def make_optimiser(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    """Adam with decoupled weight decay; `Trainer` sets the learning rate before every step."""
    return torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )


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


def _check_loss(loss: Loss, step: int) -> None:
    """Stop by name when a term is no longer a number."""
    if math.isfinite(float(loss.total.detach())):
        return
    for name, value in loss._asdict().items():
        if not math.isfinite(float(value.detach())):
            raise RetreeverError(f"training stopped at step {step}: the loss term '{name}' is {float(value.detach())}")
