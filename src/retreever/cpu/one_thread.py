"""Small work on a CPU: one thread is done before a second one has woken up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Let torch use a single thread inside, where that is `wanted`."""
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
