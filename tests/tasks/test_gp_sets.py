"""Fixed sets of GP functions: from disk they are to the bit what is drawn afresh, and a lost file harms nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from retreever.tasks import gp_sets
from retreever.tasks.gp import KERNELS, GPTask, Hyperparameters, Kernel
from retreever.tasks.gp_sets import Drawn, fixed_set
from retreever.tasks.padding import balanced_sizes
from retreever.tasks.seeds import stream

TASK = GPTask(test_batches=12)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, used for small sets too."""
    monkeypatch.setenv("RETREEVER_CACHE", str(tmp_path))
    monkeypatch.setattr(gp_sets, "ON_DISK", 10)
    fixed_set.cache_clear()
    yield tmp_path
    fixed_set.cache_clear()


def afresh(task: GPTask) -> list[Drawn]:
    generator = stream(f"gp-{task.kernel}-{task.ranges}", "test", 0)
    sizes = balanced_sizes(50, generator)
    return [task.draw(16, generator, sizes=next(sizes)) for _ in range(task.test_batches)]


def again(task: GPTask) -> list[Drawn]:
    """As a new process would have it."""
    fixed_set.cache_clear()
    return list(task._fixed("test", task.test_batches))


def equal(first: list[Drawn], second: list[Drawn]) -> bool:
    """To the bit, with the same types and strides."""
    return len(first) == len(second) and all(
        torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
        for (one, hyper), (two, other) in zip(first, second, strict=True)
        for a, b in [
            (one.xc, two.xc),
            (one.yc, two.yc),
            (one.xt, two.xt),
            (one.yt, two.yt),
            *zip(hyper, other, strict=True),
        ]
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_drawn_kept_and_read_are_the_same(cache: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    task = GPTask(kernel, test_batches=12)
    expected = afresh(task)
    assert equal(again(task), expected) and len(list(cache.glob("gp-*-test-*.safetensors"))) == 1
    monkeypatch.setattr(GPTask, "draw", None)
    assert equal(again(task), expected)
    assert all(isinstance(hyper, Hyperparameters) for _, hyper in again(task))


def test_tasks_of_the_same_settings_share_one_copy(cache: Path) -> None:
    first, second = next(GPTask(test_batches=12).test()), next(GPTask(test_batches=12).test())
    assert first.xc is second.xc and first.xc is not next(GPTask(ranges="paper", test_batches=12).test()).xc


def test_sets_of_other_kernels_ranges_and_lengths_stay_apart(cache: Path) -> None:
    tasks = [GPTask(kernel, "paper" if paper else "code", 12) for kernel in KERNELS for paper in (False, True)]
    firsts = {float(next(task.test()).xc[0, 0, 0]) for task in [*tasks, *tasks]}
    assert len(firsts) == len(tasks) == len(list(cache.glob("*.safetensors")))
    longer = list(GPTask(test_batches=14).test())
    assert len(longer) == 14 and equal([(batch, ()) for batch in longer[:12]], [(b, ()) for b in TASK.test()])  # type: ignore[misc]


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_damaged_file_is_made_again(cache: Path, cut: int) -> None:
    expected = again(TASK)
    (file,) = cache.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    assert equal(again(TASK), expected) and file.read_bytes() == whole
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert equal(again(TASK), expected) and file.read_bytes() == whole


def test_without_a_place_functions_are_drawn(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = again(TASK)
    blocked = cache / "file"
    blocked.touch()
    monkeypatch.setenv("RETREEVER_CACHE", str(blocked))
    assert equal(again(TASK), expected)


def test_small_sets_are_not_worth_a_file(cache: Path) -> None:
    assert len(list(TASK.validation(9))) == 9 and list(cache.iterdir()) == []
