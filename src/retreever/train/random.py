"""Torch's own generator, lent: dropout draws from it, and every run has its own state of it.

Runs side by side do not disturb each other, in one thread or several: a run has the generator to itself during a step.
Numbers that other code draws from it in another thread at the same moment cannot be told apart from those of dropout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LENT = threading.RLock()  # torch has one default generator for all threads of a process


class OwnDefault:
    """A run's own state of torch's generator on `device`."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, torch's generator goes on from this state; afterwards it has the one it had."""
        with _LENT:
            if self.device.type == "cuda":
                yield from self._lent_cuda()
                return
            state = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                yield
            finally:
                self.generator.set_state(torch.get_rng_state())
                torch.set_rng_state(state)

    def _lent_cuda(self) -> Iterator[None]:
        """Shared, not copied: a graph captured here keeps this state, with the device memory it is read from."""
        default = torch.cuda.default_generators[torch.cuda._utils._get_device_index(self.device, optional=True)]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def get_state(self) -> Tensor:
        """As of `torch.Generator`."""
        return self.generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """As of `torch.Generator`."""
        self.generator.set_state(state)
