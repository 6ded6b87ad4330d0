"""Several processes, one run: started by torchrun, on one machine or many.

Every process draws the same global batch and the same noise and works on its own rows, so gradients are those of one
process with the whole batch. The first process evaluates and writes; the others hear from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retreever.batch import Batch
from retreever.errors import ConfigError, RetreeverError
from retreever.objective import Loss
from retreever.train.protocols import Draws

PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's place among those of the job."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process evaluates and writes."""
        return self.rank == 0

    def check(self, batch: int) -> None:
        """Every process must get as many rows as any other, or means would be off."""
        if batch % self.world:
            raise ConfigError(f"batch: expected a multiple of the {self.world} processes, got {batch}")

    def rows(self, size: int) -> slice:
        """The rows of a global batch that are this process's own."""
        share = size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, value: float, device: torch.device) -> float:
        """The mean of a scalar over all processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return float(total) / self.world

    def mean_of(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, where the tensor is."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    def from_first(self, value: float | None, device: torch.device) -> float:
        """The first process's `value`, everywhere."""
        if self.world == 1:
            assert value is not None
            return value
        shared = torch.tensor(0.0 if value is None else value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def gather(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensors of all processes, a row for each, on the CPU."""
        mine = tensor.to(device)
        rows = [mine]
        if self.world > 1:
            rows = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The largest of each value over all processes."""
        if self.world == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        found: list[float] = shared.tolist()
        return found

    def wait(self) -> None:
        """Return once all processes have come here."""
        if self.world > 1:
            dist.barrier()


class Agreement:
    """Whether any process was asked to stop, found out by all after the same step.

    Processes ask each other about twice a second: how many steps lie between two questions follows from the time the
    slowest process took since the last one, which all know.
    """

    PERIOD, MOST = 0.5, 64  # seconds; steps

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.every, self.left, self.since = 1, 1, time.monotonic()

    def stop(self, asked: bool) -> bool:
        """Whether to stop now; to be called by all processes after each step."""
        if self.ranks.world == 1:
            return asked
        self.left -= 1
        if self.left > 0:
            return False
        now = time.monotonic()
        anyone, seconds = self.ranks.largest([float(asked), now - self.since], self.device)
        self.every = max(1, min(self.MOST, 2 * self.every, int(self.every * self.PERIOD / max(seconds, 1e-6))))
        self.left, self.since = self.every, now
        return anyone > 0


class LossOf(nn.Module):
    """A model whose forward pass is its loss, which is what DistributedDataParallel synchronises."""

    def __init__(self, model: nn.Module, mean: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.mean = model, mean

    def forward(self, batch: Batch, draws: Draws | None) -> Loss:
        model: Any = self.model
        return model.loss(batch) if draws is None else model.loss(batch, draws, self.mean)


def synchronised(model: nn.Module, ranks: Ranks) -> nn.Module:
    """`model`'s loss, with gradients averaged over all processes."""
    if ranks.world == 1:
        return LossOf(model)
    return nn.parallel.DistributedDataParallel(LossOf(model, ranks.mean_of))


@contextmanager
def ranks_of_job(device: str) -> Iterator[tuple[Ranks, str]]:
    """Join the other processes if torchrun started this one; gives the place and the device of this process."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield Ranks(), device
        return
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
    try:
        yield ranks, device
        dist.barrier()  # leave together: the first process still evaluates and writes when the others are done
    except (RuntimeError, dist.DistBackendError) as error:
        if isinstance(error, RetreeverError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RetreeverError(f"process {ranks.rank} of {ranks.world} lost the others or failed: {lines[0]}") from error
    finally:
        dist.destroy_process_group()
