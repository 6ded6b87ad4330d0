"""Batches of random sizes in a few fixed shapes, drawn on the device without synchronisation, as CUDA graphs need it.

In the paper one context size N ~ U{3..most-4} and one target size M ~ U{3..most-1-N} hold for a whole batch (`Law`
"batch"). They are drawn on the host, which picks the smallest room they fit into; points are drawn on the device.

Gradients of a batch of one size have a high variance. So for training each task of a batch can get its own context
size, of the same law, drawn on the device, and as many targets as the other tasks (`Law` "each").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from retreever.batch import Batch
from retreever.tasks.seeds import integer

FEWEST = 3
Law = Literal["each", "batch"]
LAWS: tuple[Law, ...] = get_args(Law)


class Room(NamedTuple):
    """The most points a batch of one shape can hold."""

    context: int
    target: int


class Sizes(NamedTuple):
    """Numbers of context and target points of a batch, and the room for them."""

    n: int
    m: int
    room: Room


def rooms_for(most: int, contexts: Sequence[int], parts: int = 1) -> tuple[Room, ...]:
    """Rooms for contexts of up to each of `contexts` points, with `parts` sizes of targets each."""
    rooms = []
    fewest = FEWEST
    for context in contexts:
        targets = most - 1 - fewest
        rooms += [Room(context, -(-targets * part // parts)) for part in range(1, parts + 1)]
        fewest = context + 1
    return tuple(rooms)


def draw_sizes(most: int, rooms: Sequence[Room], generator: torch.Generator) -> Sizes:
    """Numbers of context and target points, and the smallest of `rooms` that holds them."""
    n = integer(FEWEST, most - FEWEST, generator)
    m = integer(FEWEST, most - n, generator)
    room = min((room for room in rooms if room.context >= n and room.target >= m), key=tuple)
    return Sizes(n, m, room)


def balanced_sizes(most: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """Endless sizes of the same law, evenly spread by a Sobol sequence scrambled with the generator's seed.

    For fixed sets: batches differ mostly by their sizes, so with evenly spread sizes the score of a set is several
    times closer to its expectation than with sizes drawn independently.
    """
    engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=generator.initial_seed() % 2**31)  # type: ignore[no-untyped-call]
    while True:
        u, v = engine.draw(1, dtype=torch.float64)[0].tolist()
        n = FEWEST + int(u * (most - 2 * FEWEST))
        yield n, FEWEST + int(v * (most - FEWEST - n))


def context_sizes(most: int, tasks: int, generator: torch.Generator) -> Int64[Tensor, "tasks 1"]:
    """A context size for each task, on the generator's device."""
    return torch.randint(FEWEST, most - FEWEST, (tasks, 1), generator=generator, device=generator.device)


def divide(
    x: Float[Tensor, "b p dx"], y: Float[Tensor, "b p dy"], n: Int64[Tensor, "*b1"], m: Int64[Tensor, ""], room: Room
) -> Batch:
    """A batch with the first n points (one number, or one per row) as context and up to m following ones as target."""
    b, points = x.shape[:2]
    context, target = torch.arange(room.context, device=x.device), torch.arange(room.target, device=x.device)
    target_index = (n + target).expand(b, -1)
    masks = (context < n).expand(b, -1), (target < m) & (target_index < points)
    index = target_index.clamp_max(points - 1)[..., None]
    xt, yt = (values.gather(1, index.expand(-1, -1, values.shape[2])) for values in (x, y))
    return Batch(x[:, : room.context], y[:, : room.context], xt, yt, *masks)
