"""The training loop: sample, step, look at validation now and then, stop early when told to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from retreever.arguments import reject
from retreever.batch import Batch
from retreever.checks import find_device
from retreever.errors import InputError, RetreeverError
from retreever.objective import Loss
from retreever.tasks.padding import Room
from retreever.train.config import TrainConfig
from retreever.train.distributed import Ranks, synchronised
from retreever.train.graph import capture
from retreever.train.optimise import autocast, learning_rate, make_optimiser, numerics, set_rate
from retreever.train.protocols import Model, Padded, Progress, Record, Searches, Task
from retreever.train.random import OwnDefault
from retreever.train.score import evaluate

ALONE = Ranks()
PATHS = 0x5EED  # sets the stream of sampled paths apart from that of the data
CAUSE = "if the data are finite, the learning rate may be too high"
COMPILED = 128  # models and shapes in one process; torch gives up after eight
CAUSES = {
    **dict.fromkeys(("xc", "yc", "xt"), "it is in the data"),
    "yt": "it is in the data; output_mask says which outputs are known",
}
AHEAD = 50  # steps a GPU may run ahead of the checks of its losses


class Trainer:
    """One run: a model, its optimiser, its random streams and how far it has come.

    The same model, task and config give the same bits on the same machine, alone or beside other runs in the process:
    data, sampled paths and dropout each have a stream of the run's own. Dropout draws from torch's default generator,
    which is the run's during a step; other threads should not draw from it meanwhile (give them a generator).

    On a GPU the whole step is one CUDA graph where the task gives batches of a few shapes (`Padded`); steps are then
    queued without waiting for their losses, which `settle` reads.
    """

    def __init__(
        self, model: Model, task: Task, config: TrainConfig, device: str = "cpu", ranks: Ranks = ALONE
    ) -> None:
        _check_run(model, task, config)
        ranks.check(config.batch)
        self.model, self.task, self.config, self.ranks = model, task, config, ranks
        self.device = find_device(device)
        model.to(str(self.device))
        model.train()
        cuda = self.device.type == "cuda"
        capturable = getattr(model, "capturable", True)  # False where a model has to wait for the device
        self.graphed = cuda and config.graph and capturable and ranks.world == 1 and isinstance(task, Padded)
        data = task.training(config.seed)
        seed = data.initial_seed()
        self.stream = torch.Generator(self.device).manual_seed(seed) if self.graphed else data
        self.sizing = data if self.graphed else torch.Generator()  # the host's part of the data: how many points
        self.sizes, self.room = torch.zeros(2, dtype=torch.int64, device=self.device), Room(0, 0)
        self.paths = torch.Generator(self.device).manual_seed(seed ^ PATHS)
        self.dropout = OwnDefault(self.device, config.seed + ranks.rank)
        self.queue: Any = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        assert isinstance(model, nn.Module)
        loss_of = synchronised(model, ranks)
        self.loss_of: Any = compiled(loss_of) if config.compile else loss_of
        self.optimiser = make_optimiser(model, config, self.graphed)
        self.terms = torch.zeros(AHEAD, len(Loss._fields), device=self.device)  # of the newest steps, the last one last
        self.step, self.seconds, self._settled = 0, 0.0, 0
        self.history: list[Record] = []
        self._since: float | None = None
        self.graphs: dict[Room, torch.cuda.CUDAGraph] = {}
        self._validation: list[Batch] = []

    @property
    def done(self) -> bool:
        """Whether the last step is behind it or the metric is where it should be."""
        stop_at = self.config.stop_at
        reached = stop_at is not None and bool(self.history) and self.history[-1].metric >= stop_at
        return reached or self.step >= self.config.steps

    @property
    def due(self) -> bool:
        """Whether it is time to `settle`: losses to read, a look at validation, a checkpoint, the end."""
        c, step = self.config, self.step
        ahead = AHEAD if self.graphed else 1
        return step - self._settled >= ahead or 0 in (step % c.evaluate_every, step % c.save_every, c.steps - step)

    @property
    def pending(self) -> bool:
        """Whether steps were launched that `settle` has not looked at."""
        return self.step > self._settled

    def restart(self, step: int, seconds: float, history: list[Record]) -> None:
        """Count from `step`, as after that many steps of an earlier process."""
        self.step, self._settled, self.seconds, self.history = step, step, seconds, history

    def advance(self) -> Progress:
        """Steps until it is time to look at them; on a CPU one."""
        self.launch()
        while not self.due:
            self.launch()
        return self.settle()

    def launch(self) -> None:
        """One step; with a CUDA graph it is queued and nobody waits for it."""
        if self._since is None:
            self._since = time.perf_counter()
        with self.working():
            set_rate(self.optimiser, self.config.lr * learning_rate(self.config, self.step))
            try:
                if self.graphed:
                    self._replay()
                else:
                    self.train()
            except InputError as error:
                raise InputError(_in_step(error, self.step + 1)) from None
        self.step += 1

    def settle(self) -> Progress:
        """Wait for the steps so far, check their losses, and look at validation when it is time."""
        with self.working():
            rows = self.terms[self._settled - self.step :].tolist()
        for step, row in enumerate(rows, self.step + 1 - len(rows)):
            _check_loss(Loss(*row), step)
        self._settled = self.step
        due = self.step % self.config.evaluate_every == 0 or self.step == self.config.steps
        due = due and getattr(self.task, "validates", True)
        value = self._validate() if due else None
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - (self._since or now), now
        terms = dict(zip(Loss._fields, rows[-1], strict=True))
        if value is not None:
            means = {name: self.ranks.mean(term, self.device) for name, term in terms.items()}
            self.history.append(Record(self.step, value, means["task"], self.seconds, means))
        metric = self.history[-1].metric if self.history else None
        return Progress(self.step, self.config.steps, terms["task"], metric, self.seconds, terms)

    def train(self) -> None:
        """Sample, forward, backward, clip, update."""
        config, mine = self.config, self.ranks.rows(self.config.batch)
        batch = self._batch()
        draws = self.model.draws_for(batch, self.paths) if isinstance(self.model, Searches) else None
        with numerics(config):
            with autocast(config, self.device):
                loss: Loss = self.loss_of(batch.rows(mine), None if draws is None else draws.rows(mine))
            self.optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward(loss.total)
            if config.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip, foreach=True)
            self.optimiser.step()
        newest = torch.stack([term.detach().to(self.terms) for term in loss])
        self.terms.copy_(torch.cat([self.terms[1:], newest[None]]))

    def _replay(self) -> None:
        """The graph of the shape the next batch needs, captured when first needed."""
        assert isinstance(self.task, Padded)
        n, m, self.room = self.task.draw_sizes(self.sizing)
        self.sizes[0].fill_(n)
        self.sizes[1].fill_(m)
        if self.room not in self.graphs:
            self.graphs[self.room] = capture(self, next(iter(self.graphs.values()), None))
        self.graphs[self.room].replay()

    @contextmanager
    def working(self) -> Iterator[None]:
        """On the run's own queue, with torch's own generator, which dropout draws from, in the run's own state."""
        with self.dropout.lent(), torch.cuda.stream(self.queue) if self.queue is not None else nullcontext():
            yield

    def _batch(self) -> Batch:
        if self.graphed and isinstance(self.task, Padded):
            return self.task.sample_padded(self.config.batch, self.stream, self.sizes, self.room)
        return self.task.sample(self.config.batch, self.stream, self.device)

    def _validate(self) -> float:
        if not self.ranks.first:
            return self.ranks.from_first(None, self.device)
        self._validation = self._validation or list(self.task.validation())
        with self.working():
            value = evaluate(self.model, self.task, self._validation, self.device)
        return self.ranks.from_first(value, self.device)


def compiled(loss_of: Any) -> Any:
    """`loss_of` compiled for the few shapes of one run. torch counts all models of a class, of all runs, as one."""
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED)
    return torch.compile(loss_of, fullgraph=True, dynamic=False)


def _check_run(model: Model, task: Task, config: TrainConfig) -> None:
    """What would otherwise fail somewhere inside the first step."""
    if not isinstance(config, TrainConfig):
        reject("config", "a TrainConfig", type(config).__name__)
    if not isinstance(model, nn.Module) or not isinstance(model, Model):
        reject("model", "a model of this library, or a module with loss and predict", type(model).__name__)
    if isinstance(task, type):
        reject("task", "a task", f"the class {task.__name__}")
    if not isinstance(task, Task):
        lacks = next(name for name in ("training", "sample", "validation", "metric") if not hasattr(task, name))
        reject(
            "task", "a task with training, sample, validation and metric", f"a {type(task).__name__} without {lacks}"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        reject("model", "weights to train", "none that require a gradient")


def _check_loss(loss: Loss, step: int) -> None:
    """Stop by name when a term is no longer a number; the total is named when it is the only one."""
    if math.isfinite(loss.total):
        return
    wrong = [f"'{name}' is {value}" for name, value in loss._asdict().items() if not math.isfinite(value)]
    terms = ", ".join(wrong[1:] or wrong)
    raise RetreeverError(f"training stopped at step {step}: the loss term {terms}; {CAUSE}")


def _in_step(error: InputError, step: int) -> str:
    """What a model refused while it was trained, and when."""
    cause = f"; {CAUSES.get(str(error).partition(':')[0], CAUSE)}" if "expected finite" in str(error) else ""
    return f"{error} (training step {step}{cause})"
