"""What is trained on is never what is evaluated on, whatever the seed; what is evaluated on is always the same."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retreever.batch import Batch
from retreever.tasks.copy import CopyTask
from retreever.tasks.gp import GPTask
from retreever.tasks.images import Images, ImageTask
from retreever.tasks.seeds import derive_seed, integer, stream


class NoiseTask(ImageTask):
    """Completion of images of noise."""

    name = "noise"
    validation_images = 20

    @property
    def training_images(self) -> Images:
        return torch.randint(256, (60, 16, 16, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    @property
    def test_images(self) -> Images:
        return self.training_images.flip(1)


TASKS = {"copy": CopyTask(16, 128), "gp": GPTask(test_batches=8), "images": NoiseTask()}
each_task = pytest.mark.parametrize("name", TASKS)


def fingerprint(batches: Iterable[Batch]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for part in (batch.xc, batch.yc, batch.xt, batch.yt):
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


@given(st.integers(0, 2**63 - 1), st.sampled_from(["copy-256", "gp-rbf-code", "emnist", "celeba", "activity-paper"]))
def test_no_training_seed_is_an_evaluation_seed(seed: int, task: str) -> None:
    derived = [derive_seed(task, "train", seed), derive_seed(task, "validation", 0), derive_seed(task, "test", 0)]
    assert len(set(derived)) == 3 and all(0 <= value < 2**63 for value in derived)


def test_seeds_purposes_and_tasks_all_differ() -> None:
    derived = {
        derive_seed(task, purpose, seed)  # type: ignore[arg-type]
        for task in ("copy-16", "copy-32", "emnist")
        for purpose in ("train", "validation", "test", "init")
        for seed in range(200)
    }
    assert len(derived) == 3 * 4 * 200


@each_task
def test_no_training_example_is_an_evaluation_example(name: str) -> None:
    """The first batches of 30 seeds, example by example."""
    task = TASKS[name]
    fixed = [row for batch in (*task.validation(), *task.test()) for row in rows(batch)]
    trained = [row for seed in range(30) for row in rows(task.sample(16, task.training(seed)))]
    assert not set(fixed) & set(trained) and len(set(trained)) == len(trained)


def rows(batch: Batch) -> list[bytes]:
    return [
        torch.cat([x.flatten().float(), y.flatten().float()]).numpy().tobytes()
        for x, y in zip(batch.xc, batch.yc, strict=True)
    ]


@each_task
def test_evaluation_repeats_to_the_bit(name: str) -> None:
    """Whatever else is drawn in between, and whatever the global seed is."""
    task = TASKS[name]
    first = fingerprint(task.validation()), fingerprint(task.test())
    torch.manual_seed(1)
    task.sample(16, task.training(0))
    assert (fingerprint(task.validation()), fingerprint(task.test())) == first and first[0] != first[1]


def test_evaluation_repeats_in_another_process() -> None:
    code = """
import hashlib
from retreever.tasks.gp import GPTask
from retreever.tasks.copy import CopyTask
found = hashlib.sha256()
for batch in (*GPTask(test_batches=8).test(), *CopyTask(16, 128).test()):
    for part in (batch.xc, batch.yc, batch.xt, batch.yt):
        found.update(part.contiguous().numpy().tobytes())
print(found.hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == fingerprint((*GPTask(test_batches=8).test(), *CopyTask(16, 128).test()))


@given(st.integers(-50, 50), st.integers(1, 50), st.integers(0, 1_000))
def test_integers_lie_in_their_range(low: int, width: int, seed: int) -> None:
    assert low <= integer(low, low + width, stream("any", "train", seed)) < low + width
