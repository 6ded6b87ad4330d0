"""Fixed sets of GP functions, drawn once: shared in memory by tasks of the same settings, large ones kept on disk.

What comes from disk is to the bit what would be drawn afresh; the file is one of `cache`, verified whenever it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from retreever.batch import Batch
from retreever.data.cache import cached_file
from retreever.tasks.padding import balanced_sizes
from retreever.tasks.seeds import stream

FUNCTIONS = 16  # in a batch
ON_DISK = 500  # batches; fewer are drawn in no time
Hyper = tuple[Tensor, Tensor, Tensor]
Purpose = Literal["validation", "test"]
Drawn = tuple[Batch, Hyper]


class Draws(Protocol):
    """A task that draws functions; equal tasks draw the same ones."""

    def draw(
        self, size: int, generator: torch.Generator, device: str = "cpu", sizes: tuple[int, int] | None = None
    ) -> tuple[Batch, Any]:
        """Functions, with so many context and target points, and length-scale, output scale and period of each."""

    def __hash__(self) -> int: ...


class Flat(NamedTuple):
    """A set as few large tensors: batches one after another, in each the functions, in those context, then targets."""

    sizes: Int64[Tensor, "batches 2"]
    x: Float32[Tensor, " values"]
    y: Float32[Tensor, " values"]
    hyper: Float64[Tensor, "batches 3 16"]


@lru_cache(maxsize=16)
def fixed_set(task: Draws, name: str, most: int, purpose: Purpose, batches: int) -> tuple[Drawn, ...]:
    """The first `batches` batches of that task and purpose, of fewer than `most` points; not to be changed."""
    if batches < ON_DISK:
        return tuple(_draw(task, name, most, purpose, batches))
    from safetensors.torch import load_file, save

    settings = {"task": name, "purpose": purpose, "batches": batches, "torch": torch.__version__, "version": 2}
    drawn: list[Drawn] = []

    def make() -> Iterator[bytes]:
        drawn.extend(_draw(task, name, most, purpose, batches))
        yield save(flatten(drawn)._asdict())

    file = cached_file(f"{name}-{purpose}.safetensors", settings, make)
    if file is not None and not drawn:
        try:
            return tuple(unflatten(Flat(**load_file(file))))
        except OSError:  # removed by someone in this very moment
            pass
    return tuple(drawn or _draw(task, name, most, purpose, batches))


def flatten(drawn: list[Drawn]) -> Flat:
    """Batches as few large tensors."""
    sizes = torch.tensor([[batch.xc.shape[1], batch.xt.shape[1]] for batch, _ in drawn])
    x = torch.cat([torch.cat([batch.xc, batch.xt], dim=1).flatten() for batch, _ in drawn])
    y = torch.cat([torch.cat([batch.yc, batch.yt], dim=1).flatten() for batch, _ in drawn])
    return Flat(sizes, x, y, torch.stack([torch.stack([part.flatten() for part in hyper]) for _, hyper in drawn]))


def unflatten(flat: Flat) -> Iterator[Drawn]:
    """The batches again."""
    pairs: list[list[int]] = flat.sizes.tolist()
    lengths = [FUNCTIONS * (n + m) for n, m in pairs]
    pieces = zip(pairs, torch.split(flat.x, lengths), torch.split(flat.y, lengths), flat.hyper, strict=True)
    for (n, m), x, y, hyper in pieces:
        x, y = x.view(FUNCTIONS, n + m, 1), y.view(FUNCTIONS, n + m, 1)
        length, scale, period = hyper.view(3, FUNCTIONS, 1, 1)
        yield Batch(xc=x[:, :n], yc=y[:, :n], xt=x[:, n:], yt=y[:, n:]), (length, scale, period)


def _draw(task: Draws, name: str, most: int, purpose: Purpose, batches: int) -> Iterator[Drawn]:
    generator = stream(name, purpose, 0)
    sizes = balanced_sizes(most, generator)
    return (task.draw(FUNCTIONS, generator, sizes=next(sizes)) for _ in range(batches))
