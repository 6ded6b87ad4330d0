"""Solvers of dz/dt = f(z) for a batch in which every row has its own times.

`euler` and `solve_fixed` (Dormand and Prince's fifth-order steps) take a given number of steps, so that nothing waits
for the device and a training step can be one CUDA graph. `solve_adaptive` chooses its steps by their error, as latent
ODEs were published; it needs torchdiffeq.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.errors import BackendError

Field = Callable[[Tensor], Tensor]  # f: (b, d) -> (b, d)
# Weights of the earlier stages in each stage of a step (Dormand and Prince 1980); the last row makes the result.
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)


def euler(f: Field, z: Float[Tensor, "*b d"], span: Float[Tensor, "*b 1"], steps: int = 1) -> Float[Tensor, "*b d"]:
    """z after the time `span`, by `steps` steps of z + dt f(z)."""
    for _ in range(steps):
        z = z + span / steps * f(z)
    return z


def dopri5_step(
    f: Field, z: Float[Tensor, "b d"], slope: Float[Tensor, "b d"], dt: Float[Tensor, "b 1"]
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
    """z and f(z) after one step of fifth order; `slope` is f(z) before it. Six evaluations of f."""
    slopes, after = [slope], z
    for stage in STAGES:
        after = z + dt * torch.stack([weight * k for weight, k in zip(stage, slopes, strict=True)]).sum(dim=0)
        slopes.append(f(after))
    return after, slopes[-1]


def solve_fixed(
    f: Field, start: Float[Tensor, "b d"], times: Float[Tensor, "b m"], steps: int
) -> Float[Tensor, "b m d"]:
    """z at `times` >= 0 from `start` at time 0, by `steps` equal steps to the row's latest time.

    Between steps a cubic through both ends and their slopes interpolates. Takes 6 * steps + 1 evaluations of f.
    """
    latest = torch.cat([times.new_zeros(len(times), 1), times], dim=1).amax(dim=1, keepdim=True)  # m may be 0
    span = latest.clamp_min(torch.finfo(times.dtype).tiny)
    dt = span / steps
    states, slopes = [start], [f(start)]
    for _ in range(steps):
        z, slope = dopri5_step(f, states[-1], slopes[-1], dt)
        states.append(z)
        slopes.append(slope)
    place = times / dt
    left = place.floor().clamp(0, steps - 1)
    at, u = left.long()[..., None].expand(-1, -1, start.shape[1]), (place - left)[..., None]
    z, k = torch.stack(states, dim=1), torch.stack(slopes, dim=1) * dt[..., None]
    ends = z.gather(1, at), k.gather(1, at), z.gather(1, at + 1), k.gather(1, at + 1)
    return _hermite(*ends, u)


def _hermite(z0: Tensor, k0: Tensor, z1: Tensor, k1: Tensor, u: Tensor) -> Tensor:
    """The cubic with values z0, z1 and slopes k0, k1 at 0 and 1, at u."""
    rise = z1 - z0
    return z0 + u * (rise + (1 - u) * ((1 - u) * (k0 - rise) - u * (k1 - rise)))


def solve_adaptive(
    f: Field, start: Float[Tensor, "b d"], times: Float[Tensor, "b m"], rtol: float = 1e-3, atol: float = 1e-4
) -> Float[Tensor, "b m d"]:
    """As `solve_fixed`, by torchdiffeq's dopri5 on all times of the batch together."""
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise BackendError(f"solver: adaptive needs torchdiffeq ({error}); pip install 'retreever[ode]'") from None
    every: Any = torch.cat([times.new_zeros(1), times.flatten()])
    axis, index = every.unique(return_inverse=True)
    if len(axis) == 1:  # torchdiffeq wants two times at least
        return start[:, None].expand(-1, times.shape[1], -1)
    found = odeint(lambda _, z: f(z), start, axis, rtol=rtol, atol=atol, method="dopri5").transpose(0, 1)
    return found.gather(1, index[1:].view_as(times)[..., None].expand(-1, -1, start.shape[1]))
