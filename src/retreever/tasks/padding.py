"""Batches of random sizes in a few fixed shapes, drawn on the device without waiting for it: what CUDA graphs can hold.

As in the paper one context size N ~ U{3..most-4} and one target size M ~ U{3..most-1-N} hold for a whole batch. The
sizes are drawn on the host, which then knows the smallest room they fit into; points are drawn on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from retreever.batch import Batch
from retreever.tasks.seeds import integer

FEWEST = 3


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


def divide(x: Float[Tensor, "b p dx"], y: Float[Tensor, "b p dy"], sizes: Int64[Tensor, " 2"], room: Room) -> Batch:
    """The first n points as context and the next m as target, masked; `sizes` (n, m) may lie on the device."""
    b, points = x.shape[:2]
    n, m = sizes.unbind()
    context, target = torch.arange(room.context, device=x.device), torch.arange(room.target, device=x.device)
    there = (n + target).clamp_max(points - 1)
    masks = (context < n).expand(b, -1), (target < m).expand(b, -1)
    return Batch(x[:, : room.context], y[:, : room.context], x[:, there], y[:, there], *masks)
