"""Runs side by side: the bits of each are those it has alone, and one that fails takes nobody with it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.errors import RetreeverError
from retreever.lab.recipes.recipe import make_recipe
from retreever.tasks.copy import CopyTask
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint
from retreever.train.engine import Trainer
from retreever.train.run import RunFolder
from retreever.train.together import Run, Stopped, train_in, train_together

BRIEF = {"steps": 12, "batch": 4, "warmup": 4, "evaluate_every": 5, "save_every": 3}
RECIPE = make_recipe("copy", n=8, dropout=0.1, **BRIEF)


def a_run(folder: Path, seed: int, *watchers: Any, **changes: Any) -> Run:
    recipe = RECIPE.changed(seed=seed, **changes)
    torch.manual_seed(7)
    trainer = Trainer(recipe.make_model(), CopyTask(8), recipe.train)
    return Run(RunFolder(folder / f"seed{seed}"), trainer, watchers)


def newest(folder: RunFolder) -> dict[str, Any]:
    found = latest_checkpoint(folder.checkpoints)
    assert found is not None
    return load_checkpoint(found)[0]


def assert_same(one: RunFolder, other: RunFolder) -> None:
    first, second = newest(one), newest(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_in_company_a_run_has_the_bits_it_has_alone(tmp_path: Path) -> None:
    together = [a_run(tmp_path / "together", seed) for seed in (0, 1, 2)]
    train_together(together)
    for seed in (0, 1, 2):
        alone = a_run(tmp_path / "alone", seed)
        train_in(alone.folder, alone.trainer)
        assert_same(together[seed].folder, alone.folder)
    assert len({json.dumps([r.loss for r in run.trainer.history]) for run in together}) == 3


def test_stopped_together_and_resumed_alone(tmp_path: Path) -> None:
    def ask(progress: Any) -> None:
        if progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    runs = [a_run(tmp_path / "broken", 0), a_run(tmp_path / "broken", 1, ask)]
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step 7; 2 runs can be resumed$"):
        train_together(runs)
    train_together([a_run(tmp_path / "whole", seed) for seed in (0, 1)])
    for seed in (1, 0):
        again = a_run(tmp_path / "broken", seed)
        train_in(again.folder, again.trainer)
        assert_same(again.folder, RunFolder(tmp_path / "whole" / f"seed{seed}"))


def test_a_run_that_fails_ends_alone_with_its_last_good_checkpoint(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, seed) for seed in (0, 1)]

    def poison(progress: Any) -> None:
        if progress.step == 5:
            with torch.no_grad():
                next(iter(runs[0].trainer.model.parameters())).fill_(torch.nan)

    runs[0].watchers = (poison,)
    with pytest.raises(RetreeverError, match=r"seed0: .*(nan|NaN)"):
        train_together(runs)
    assert runs[1].trainer.step == 12 and runs[1].failed is None
    found = latest_checkpoint(runs[0].folder.checkpoints)
    assert found is not None and found.name.endswith("3")
    assert all(value.isfinite().all() for value in newest(runs[0].folder).values() if value.is_floating_point())


def test_runs_in_threads_have_the_bits_they_have_alone(tmp_path: Path) -> None:
    """Dropout draws from torch's default generator, of which a process has one; it comes back as it was."""
    runs = [a_run(tmp_path / "threads", seed) for seed in (0, 1, 2)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda run: train_in(run.folder, run.trainer), runs))
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (0, 1, 2):
        alone = a_run(tmp_path / "alone", seed)
        train_in(alone.folder, alone.trainer)
        assert_same(RunFolder(tmp_path / "threads" / f"seed{seed}"), alone.folder)


def test_a_signal_the_parent_shell_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = a_run(tmp_path, 0, lambda progress: os.kill(os.getpid(), signal.SIGINT))
        train_together([run])
        assert run.trainer.done and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_runs_side_by_side_are_compiled_however_many_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the models of all runs as one function, and gives up after some of different sizes."""
    from retreever.models.cnp import CNP
    from retreever.tasks.gp import GPTask
    from retreever.train.config import TrainConfig

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    runs = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(4):
            model = CNP(dim=8 * (seed + 1), pre_depth=3, value_depth=3)
            config = TrainConfig(steps=1, batch=2, seed=seed, compile=True)
            runs.append(Run(RunFolder(tmp_path / f"seed{seed}"), Trainer(model, GPTask(sizes="each"), config)))
        train_together(runs)
    assert [run.trainer.step for run in runs] == [1] * 4
    torch.compiler.reset()
