"""Timing: warm up, then time the methods of one row in turn, sample after sample, and take medians.

Other load on the machine affects all methods alike, so ratios are more stable than absolute times. On a GPU there are
two modes: "graph" replays calls captured in a CUDA graph and measures the device alone, "eager" includes the launches
from Python.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median, quantiles
from time import perf_counter
from typing import Literal

import torch

Call = Callable[[], object]
Mode = Literal["auto", "eager", "graph"]

FEWEST = 3  # samples of a method, however slow
MOST_CALLS = 10_000  # per sample
GRAPH_CALLS = 64  # per CUDA graph
LAUNCHES = 2e-3  # seconds of calls per sample on an accelerator: the wait at the end must not count


@dataclass(frozen=True)
class Limits:
    """Limits of a row: samples per method, fewer (but at least three) where its share of the seconds is used up."""

    samples: int = 101
    seconds: float = 4.0
    shortest: float = 1e-3  # of one sample on a CPU; quick calls are repeated to fill it


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one method."""

    seconds: float
    q1: float
    q3: float
    samples: int
    calls: int
    mode: str

    def to_json(self) -> dict[str, float | int | str]:
        """The timing in microseconds, as plain data."""
        times = {"us": self.seconds, "q1_us": self.q1, "q3_us": self.q3}
        rounded = {name: float(f"{1e6 * value:.5g}") for name, value in times.items()}
        return {**rounded, "samples": self.samples, "calls": self.calls, "mode": self.mode}


def time_together(
    methods: Mapping[str, Sequence[Call]], device: torch.device, mode: Mode = "auto", limits: Limits | None = None
) -> dict[str, Timing]:
    """Time all `methods` in turn; each has one or more calls that do the same work, also taken in turn.

    Mode "auto" is "graph" on CUDA and "eager" elsewhere.
    """
    limits = limits or Limits()
    graph = device.type == "cuda" and mode != "eager"
    shortest = limits.shortest if device.type == "cpu" else LAUNCHES
    timers: dict[str, Timer] = {
        name: GraphTimer(calls, device) if graph else WallTimer(calls, device, shortest)
        for name, calls in methods.items()
    }
    with _no_garbage_collection():
        samples = _take_turns(timers, limits)
    return {name: _summary(timers[name], values) for name, values in samples.items()}


def _take_turns(timers: Mapping[str, Timer], limits: Limits) -> dict[str, list[float]]:
    share = limits.seconds / max(1, len(timers))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    spent = dict.fromkeys(timers, 0.0)
    for _ in range(limits.samples):
        for name, timer in timers.items():
            if spent[name] < share or len(samples[name]) < FEWEST:
                started = perf_counter()
                samples[name].append(timer.sample())
                spent[name] += perf_counter() - started
    return samples


class WallTimer:
    """Times several calls by the wall clock, synchronising with an accelerator at the end."""

    mode = "eager"

    def __init__(self, calls: Sequence[Call], device: torch.device, shortest: float) -> None:
        once = warm_up(calls, device)
        self.device = device
        self.calls = min(MOST_CALLS, max(1, math.ceil(shortest / once)))
        self._sequence = list(islice(cycle(calls), self.calls))

    def sample(self) -> float:
        """Seconds per call."""
        started = perf_counter()
        for call in self._sequence:
            call()
        synchronize(self.device)
        return (perf_counter() - started) / self.calls


class GraphTimer:
    """Times a CUDA graph of several calls on the device; several, so that the start of the graph hardly counts."""

    mode = "graph"

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # allocations and compilation of first calls must not be captured
            once = warm_up(calls, device)
        torch.cuda.current_stream(device).wait_stream(side)
        self.calls = min(GRAPH_CALLS, max(1, round(LAUNCHES / once)))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in islice(cycle(calls), self.calls):
                call()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self.sample()

    def sample(self) -> float:
        """Seconds per call."""
        start, end = self._events
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.calls


Timer = WallTimer | GraphTimer


def warm_up(calls: Sequence[Call], device: torch.device) -> float:
    """Run first calls, which compile and allocate; returns the rough time of a call."""
    calls[0]()
    synchronize(device)
    once = _wall(calls[0], device)
    if once > 0.05:  # slow enough to be measured by one call
        return once
    for call in calls[1:]:
        call()
    return max(1e-7, min(once, *(_wall(calls[0], device) for _ in range(3))))


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _wall(call: Call, device: torch.device) -> float:
    started = perf_counter()
    call()
    synchronize(device)
    return perf_counter() - started


def _summary(timer: Timer, values: list[float]) -> Timing:
    q1, _, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median(values), q1, q3, len(values), timer.calls, timer.mode)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
