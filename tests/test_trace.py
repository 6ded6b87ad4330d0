"""How many files a newcomer meets on the way of one prediction and of one training step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import retreever
from retreever import ReTreever
from retreever.tasks.gp import GPTask
from retreever.train import TrainConfig, Trainer

ROOT = Path(retreever.__file__).parent


def files_entered(call: Callable[[], Any]) -> set[str]:
    """Files of the package whose functions run during `call`."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {Path(file).relative_to(ROOT).as_posix() for file in found if file.startswith(str(ROOT))}


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_prediction_enters_few_files(impl: Any) -> None:
    model = ReTreever(dim=16, heads=2, layers=1, hidden=16, impl=impl).eval()
    x = torch.randn(2, 9, 1)
    mask = torch.arange(9) < torch.tensor([[9], [4]])

    def predict() -> None:
        with torch.inference_mode():
            model.predict(x, x, x, mask)

    predict()  # imports and compiles
    entered = files_entered(predict)
    assert len(entered) <= 21, sorted(entered)


def test_a_training_step_enters_few_files() -> None:
    model = ReTreever(dim=16, heads=2, layers=1, hidden=16)
    trainer = Trainer(model, GPTask(sizes="each"), TrainConfig(steps=9, batch=2, evaluate_every=9))
    trainer.advance()
    entered = files_entered(trainer.advance)
    assert len(entered) <= 30, sorted(entered)
