"""How compiled kernels are run: entry points by dtype, and threads that share a large call.

These are Python's: Numba's own parallel layer would have forked workers of a DataLoader killed once the parent has used
it.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from retreever.cpu.team import team

# Multiply-adds a thread must get before it is worth waking: it comes 25 us late and costs the caller 15 us.
GRAIN = 200_000


class Entries(dict[torch.dtype, tuple[Callable[..., None], Any]]):
    """Entry points of a kernel by dtype, compiled on first use, each with a number of that type."""

    def __init__(self, kernel: Any, *lengths: int) -> None:
        self.kernel, self.lengths = kernel, lengths

    def __missing__(self, dtype: torch.dtype) -> tuple[Callable[..., None], Any]:
        real = np.float32(1) if dtype == torch.float32 else np.float64(1)
        tuples = (types.UniTuple(types.int64, length) for length in self.lengths)
        signature = (*tuples, types.int64, types.int64, types.float32 if dtype == torch.float32 else types.float64)
        try:
            entry = self.kernel.compile(signature)
        except Exception:  # a cache folder that went away or a damaged file in it: nobody should notice
            entry = numba.njit(self.kernel.py_func, error_model="numpy", nogil=True).compile(signature)
        self[dtype] = entry, real
        return self[dtype]


def run(
    entries: Entries, dtype: torch.dtype, arguments: tuple[Any, ...], items: int, work: int, alive: Sequence[Any]
) -> None:
    """Compute all items of a kernel, with as many threads as torch uses where the work pays for waking them.

    Threads take one item after the other: one that wakes late, or not at all on a busy machine, delays nobody. Who
    computes an item makes no difference to the result.
    """
    entry, real = entries[dtype]
    helpers = 0 if work < 2 * GRAIN else min(torch.get_num_threads(), items, work // GRAIN) - 1
    if helpers < 1:
        entry(*arguments, items, 0, real)
        return
    alive = [*alive]
    turns = np.zeros(2, np.int64)  # items taken, items done
    arguments = (*arguments, items, turns.ctypes.data, real)
    team.help(helpers, (entry, arguments, (turns, alive)))
    entry(*arguments)
    polls = 0
    while turns[1] < items:  # at most one item per helper is still under way, unless something holds it up
        if (polls := polls + 1) > 200:
            time.sleep(5e-5)
    alive.clear()  # a helper still asleep will find nothing to do
