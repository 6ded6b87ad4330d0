"""Running compiled kernels: entry points by dtype, and Python threads that share a large call.

Numba's own parallel layer is not used: once a process has used it, forked workers of a DataLoader are killed.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
import torch
from numba import types

POLLS = 200  # times a caller polls for helpers to finish before it sleeps between polls
PAUSE = 5e-5  # seconds of that sleep


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
        except Exception:  # the cache folder disappeared or holds a damaged file: compile without it
            entry = numba.njit(self.kernel.py_func, error_model="numpy", nogil=True).compile(signature)
        self[dtype] = entry, real
        return self[dtype]


class Team:
    """Threads that help with large calls. A forked child starts its own.

    They run compiled kernels only and do not set torch's number of threads: that would change the default of every
    thread started later.
    """

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget all threads and jobs."""
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.lock = threading.Lock()
        self.size = 0

    def help(self, helpers: int, job: tuple[Any, ...]) -> None:
        """Queue `job` for `helpers` threads: (function, arguments, objects to keep alive until it ends)."""
        with self.lock:
            while self.size < helpers:
                threading.Thread(target=self._work, args=(self.jobs,), name="retreever", daemon=True).start()
                self.size += 1
        for _ in range(helpers):
            self.jobs.put(job)

    @staticmethod
    def _work(jobs: SimpleQueue[Any]) -> None:
        while True:
            function, arguments, alive = jobs.get()
            with suppress(MemoryError):  # raised before it claimed an item: other threads compute all items
                function(*arguments)
            del function, arguments, alive  # hold no tensors while waiting


team = Team()


def share(entry: Any, real: Any, arguments: tuple[Any, ...], items: int, helpers: int, alive: Sequence[Any]) -> None:
    """Compute all items of a kernel, with up to `helpers` threads besides the caller.

    Threads claim one item after the other, so a thread that wakes late delays no other. The result does not depend on
    which thread computes an item. `alive` are the tensors whose addresses are in `arguments`.
    """
    alive = [*alive]
    turns = np.zeros(2, np.int64)  # items taken, items done
    arguments = (*arguments, items, turns.ctypes.data, real)
    team.help(helpers, (entry, arguments, (turns, alive)))
    entry(*arguments)
    polls = 0
    while turns[1] < items:  # at most one item per helper is still under way
        polls += 1
        if polls > POLLS:
            time.sleep(PAUSE)
    alive.clear()  # a helper that wakes later finds no item to claim
