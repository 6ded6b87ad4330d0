"""Batches of random sizes in a few fixed shapes, drawn on the device without waiting for it: what CUDA graphs can hold.

In the paper one context size N ~ U{3..most-4} and one target size M ~ U{3..most-1-N} hold for a whole batch (`Law`
"batch"). They are drawn on the host, which then knows the smallest room they fit into; points are drawn on the device.

A batch of one size says nothing about the others, so steps pull to and fro. For training each task of a batch can get
a context size of its own, of the same law, drawn on the device, and as many targets as its neighbours (`Law` "each").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from retreever.batch import Batch
from retreever.tasks.seeds import integer

FEWEST = 3
Law = Literal["each", "batch"]
LAWS: tuple[Law, ...] = ("each", "batch")


class Room(NamedTuple):
    """The most points a batch of one shape can hold."""

    context: int
    target: int


class Sizes(NamedTuple):
    """Points of a batch, and the room they go into."""

    n: int
    m: int
    room: Room


def rooms_for(most: int, contexts: Sequence[int], parts: int = 1) -> tuple[Room, ...]:
    """Rooms for contexts up to each of `contexts`; targets, fewer where contexts are many, in `parts` steps."""
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
    """Sizes of the same law without end, spread evenly by a Sobol sequence scrambled with the generator's seed.

    For fixed sets: most of what tells batches apart is their sizes, so the score of a set that has its share of all of
    them is several times closer to that of endless many batches than if they were drawn one by one.
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
    x: Float[Tensor, "b p dx"],
    y: Float[Tensor, "b p dy"],
    n: Int64[Tensor, "*b1"],
    m: Int64[Tensor, ""],
    room: Room,
) -> Batch:
    """The first n points (one number, or one per row) as context and the next m, so far as there are, as target."""
    b, points = x.shape[:2]
    context, target = torch.arange(room.context, device=x.device), torch.arange(room.target, device=x.device)
    there = (n + target).expand(b, -1)
    masks = (context < n).expand(b, -1), (target < m) & (there < points)
    index = there.clamp_max(points - 1)[..., None]
    xt, yt = (values.gather(1, index.expand(-1, -1, values.shape[2])) for values in (x, y))
    return Batch(x[:, : room.context], y[:, : room.context], xt, yt, *masks)
