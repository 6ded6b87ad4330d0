"""Methods are timed in turn, warmed up, often enough and not for ever. The clock of these tests moves when told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from retreever.lab.bench.timing import FEWEST, MOST_CALLS, Limits, Timing, WallTimer, time_together, warm_up

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still but for the calls it makes, and the log of those calls."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, *seconds: float) -> Callable[[], None]:
        """A call that takes `seconds`, one after the other, the last for ever."""
        pauses = list(seconds)

        def call() -> None:
            self.log += name
            self.now += pauses.pop(0) if len(pauses) > 1 else pauses[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("retreever.lab.bench.timing.perf_counter", fake)
    return fake


def timed(methods: dict[str, Callable[[], None]], samples: int, seconds: float = 60.0) -> dict[str, Timing]:
    calls = {name: [call] for name, call in methods.items()}
    return time_together(calls, CPU, limits=Limits(samples, seconds, shortest=1e-3))


def test_methods_take_turns(clock: Clock) -> None:
    """So whatever slows the machine down hits all of them."""
    timings = timed({name: clock.call(name, 2e-3) for name in "abc"}, samples=5)
    assert clock.log.endswith("abcabcabcabcabc") and not clock.log.endswith("abc" * 6)
    for timing in timings.values():
        assert (timing.samples, timing.calls, timing.mode) == (5, 1, "eager")
        assert timing.q1 == timing.q3 == pytest.approx(2e-3) == timing.seconds


def test_the_median_counts_and_outliers_do_not(clock: Clock) -> None:
    warm = [1.0] * 2  # slow enough that two calls are all the warm-up
    found = timed({"a": clock.call("a", *warm, 1.0, 9.0, 2.0, 1.5, 1.0)}, samples=5)["a"]
    assert (found.q1, found.seconds, found.q3) == (1.0, 1.5, 2.0)


def test_a_slow_method_gives_up_early_and_a_quick_one_keeps_its_samples(clock: Clock) -> None:
    timings = timed({"slow": clock.call("s", 0.25), "quick": clock.call("q", 0.001)}, samples=40, seconds=2.0)
    assert (timings["slow"].samples, timings["quick"].samples) == (4, 40)


def test_few_samples_are_better_than_none(clock: Clock) -> None:
    assert timed({"slow": clock.call("s", 10.0)}, samples=9, seconds=0.0)["slow"].samples == FEWEST


def test_quick_calls_are_repeated_until_a_sample_is_long_enough(clock: Clock) -> None:
    timers = [WallTimer([clock.call("a", seconds)], CPU, shortest=1.0) for seconds in (0.0, 0.03125, 8.0)]
    assert [timer.calls for timer in timers] == [MOST_CALLS, 32, 1]
    assert timers[1].sample() == 0.03125


def test_calls_of_one_method_alternate(clock: Clock) -> None:
    """Different queries each time, so that a cache does not flatter."""
    timer = WallTimer([clock.call(name, 0.25) for name in "xyz"], CPU, shortest=1.25)
    clock.log = ""
    timer.sample()
    assert clock.log == "xyzxy"


def test_warm_up_leaves_the_first_call_out(clock: Clock) -> None:
    """First calls compile."""
    assert warm_up([clock.call("a", 30.0, 1e-3)], CPU) == pytest.approx(1e-3)


def test_slow_calls_are_not_warmed_up_for_long(clock: Clock) -> None:
    warm_up([clock.call("a", 4.0), clock.call("b", 4.0)], CPU)
    assert clock.log == "aa"


def test_json_is_in_microseconds() -> None:
    found = Timing(1.23456789e-3, 1e-3, 2e-3, samples=3, calls=7, mode="eager").to_json()
    assert found == {"us": 1234.6, "q1_us": 1000, "q3_us": 2000, "samples": 3, "calls": 7, "mode": "eager"}


def test_real_time_passes() -> None:
    """The one test with a real clock: sorting is slower than doing nothing."""
    numbers = torch.rand(100_000)
    found = time_together({"sort": [numbers.sort], "nothing": [lambda: None]}, CPU, limits=Limits(5, 1.0))
    assert 0 < found["nothing"].seconds < found["sort"].seconds
