"""Python threads that share work which releases the GIL: kernels, and chains of torch's operations over many rows.

Torch's own threads are woken for every single operation, which for small ones takes longer than the operation. A chain
shared out by rows wakes one thread once. Unless OMP_WAIT_POLICY=PASSIVE was set when Python started, torch's threads
spin between operations instead: waking them is cheap then, and other threads would have to share the cores with them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from retreever.cpu.one_thread import one_thread

T = TypeVar("T")
MOST = 4  # parts: with more threads than that torch does well by itself
FEWEST = 256  # rows of a part
PASSIVE = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"  # what OpenMP saw when it was loaded


class Team:
    """Threads that help with large calls. A forked child starts without any and gets its own."""

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
        """Let `helpers` threads join a computation when they wake: (function, arguments, what must stay alive)."""
        with self.lock:
            while self.size < helpers:
                threading.Thread(target=self._work, args=(self.jobs,), name="retreever", daemon=True).start()
                self.size += 1
        for _ in range(helpers):
            self.jobs.put(job)

    @staticmethod
    def _work(jobs: SimpleQueue[Any]) -> None:
        torch.set_num_threads(1)  # of this thread
        while True:
            function, arguments, alive = jobs.get()
            with suppress(MemoryError):  # raised before it took an item: the others do without it
                function(*arguments)
            del function, arguments, alive  # hold no tensors while waiting


team = Team()


def row_parts(rows: int, like: torch.Tensor, weight: int = 1) -> list[slice]:
    """Ranges of rows, each worth `weight`, to share out among threads; a single one where that does not pay."""
    threads = torch.get_num_threads()
    parts = min(threads, rows, rows * weight // FEWEST) if like.is_cpu and PASSIVE and threads <= MOST else 1
    bounds = [rows * i // max(1, parts) for i in range(max(1, parts) + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def share_out(function: Callable[[Any], T], parts: Sequence[Any]) -> list[T]:
    """function(part) of every part, at the same time, without gradients: torch uses one thread in each.

    Who is free takes the next part, so a thread that wakes late on a busy machine delays nobody.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    waiting: deque[int] = deque(range(len(parts)))
    done: SimpleQueue[None] = SimpleQueue()
    results: list[Any] = [None] * len(parts)

    def work() -> None:
        with torch.no_grad(), suppress(IndexError):
            while True:
                index = waiting.popleft()
                try:
                    results[index] = function(parts[index]), None
                except BaseException as error:  # the caller's to raise
                    results[index] = None, error
                done.put(None)

    with one_thread():
        team.help(len(parts) - 1, (work, (), None))
        work()
        for _ in parts:
            done.get()
    for _, error in results:
        if error is not None:
            raise error
    return [result for result, _ in results]
