"""Runs with a folder: stopped anywhere and resumed, they give the bits of a run that never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.cli import main
from retreever.errors import CheckpointError, ConfigError
from retreever.lab.recipes.recipe import Recipe, make_recipe
from retreever.tasks.copy import CopyTask
from retreever.tasks.gp import GPTask
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint
from retreever.train.engine import Trainer
from retreever.train.resume import resume_from, save
from retreever.train.run import RunFolder
from retreever.train.together import Stopped, train_in

BRIEF = {"steps": 16, "batch": 4, "warmup": 4, "evaluate_every": 5, "save_every": 3}
RECIPE = make_recipe("copy", n=8, dropout=0.1, **BRIEF)
ARGUMENTS = [
    "train", "copy", "--quick", "--n", "8", "--steps", "24", "--batch", "4", "--warmup", "4", "--evaluate-every", "8",
    "--save-every", "3",
]  # fmt: skip
NAME = "copy-8-tca-quick-seed0"


def a_trainer(recipe: Recipe = RECIPE) -> Trainer:
    torch.manual_seed(7)
    trainer = Trainer(recipe.make_model(), CopyTask(8), recipe.train)
    trainer._validation = list(CopyTask(8).validation(sequences=16))
    return trainer


def bits(folder: RunFolder) -> tuple[dict[str, Any], list[Any]]:
    """All tensors of the newest checkpoint, and the metrics without their wall-clock times."""
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return load_checkpoint(newest)[0], [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_same_bits(one: RunFolder, other: RunFolder) -> None:
    (tensors, rows), (others, other_rows) = bits(one), bits(other)
    assert rows == other_rows
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def newest(root: Path) -> str:
    return max((path.name for path in (root / NAME / "checkpoints").glob("step-*")), default="")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("whole"))
    train_in(folder, a_trainer())
    return folder


@pytest.mark.parametrize("stop", range(1, 16))  # every place between checkpoints and evaluations
def test_resumed_after_any_step_gives_the_same_bits(stop: int, tmp_path: Path, uninterrupted: RunFolder) -> None:
    """The process is gone after `stop` steps, saved or not; a fresh one goes on from the newest checkpoint."""
    folder = RunFolder(tmp_path)

    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == stop:
            raise Killed

    with pytest.raises(Killed):
        train_in(folder, a_trainer(), kill)
    torch.rand(13)  # whatever happened in between
    train_in(folder, a_trainer())
    assert_same_bits(folder, uninterrupted)


@pytest.mark.parametrize("model", ["anp", "bnp"])
def test_runs_that_sample_give_the_same_bits_when_resumed(model: str, tmp_path: Path) -> None:
    """Latents and bootstraps come from streams that checkpoints hold."""
    recipe = make_recipe("gp", model=model, dim=8, **BRIEF | {"steps": 6})

    def trained(folder: RunFolder, stop: int = 0) -> RunFolder:
        torch.manual_seed(7)
        trainer = Trainer(recipe.make_model(), GPTask(), recipe.train)
        trainer._validation = list(GPTask().validation(2))

        def kill(progress: Any) -> None:
            if progress.step == stop:
                raise KeyError

        train_in(folder, trainer, kill)
        return folder

    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    for folder in (whole, broken):
        folder.path.mkdir()
    with pytest.raises(KeyError):
        trained(broken, stop=4)
    torch.rand(13)
    assert_same_bits(trained(broken), trained(whole))


def test_a_signal_saves_and_leaves(tmp_path: Path, uninterrupted: RunFolder) -> None:
    folder = RunFolder(tmp_path)

    def ask(progress: Any) -> None:
        if progress.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step 10; .* can be resumed$"):
        train_in(folder, a_trainer(), ask)
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None and newest.name.endswith("10")
    train_in(folder, a_trainer())
    assert_same_bits(folder, uninterrupted)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def ask_twice(progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_in(RunFolder(tmp_path), a_trainer(), ask_twice)


def test_best_weights_are_kept(uninterrupted: RunFolder) -> None:
    _, rows = bits(uninterrupted)
    _, state = load_checkpoint(uninterrupted.checkpoints / "best")
    best = max(row["metric"] for row in rows)
    assert next(row["step"] for row in rows if row["metric"] == best) == state["step"]


def test_weights_of_another_model_are_refused_by_key(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, a_trainer())
    other = RECIPE.changed(model="ca")
    with pytest.raises(CheckpointError, match=r"step-000000000: model\.\S+: expected .*no such tensor"):
        resume_from(folder, a_trainer(other))


def start(out: Path) -> ForkProcess:
    """The command in a process that has nothing to import any more."""
    process = get_context("fork").Process(target=lambda: sys.exit(main([*ARGUMENTS, "--out", str(out), "--resume"])))
    process.start()
    return process


def kill_twice(out: Path) -> None:
    """Kill a run at random moments after a new checkpoint, then leave it in peace."""
    dice = random.Random(1)
    for _ in range(2):
        seen, process = newest(out), start(out)
        while process.is_alive() and newest(out) == seen:
            time.sleep(0.002)
        time.sleep(dice.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = start(out)
    process.join()
    assert process.exitcode == 0


def test_killed_and_resumed_through_the_command_line(tmp_path: Path) -> None:
    """SIGKILL at random moments, resumed each time, evaluated at the end: the result of the run left in peace."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main([*ARGUMENTS, "--out", str(whole)]) == 0
    done = subprocess.run([sys.executable, __file__, str(broken)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_bits(RunFolder(whole / NAME), RunFolder(broken / NAME))
    results = [json.loads((root / NAME / "result.json").read_text()) for root in (whole, broken)]
    assert results[0]["test"] == results[1]["test"]
    assert main(["eval", str(broken / NAME), "--checkpoint", "last"]) == 0


def test_existing_runs_and_impossible_options_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / NAME)
    folder.start(RECIPE.to_json(), resume=False, overwrite=False)
    before = (folder.path / "config.json").read_text()
    cases = [
        (["--out", str(tmp_path)], "out: expected a new folder"),
        (["--out", str(tmp_path), "--resume"], "resume: expected the settings of"),
        (["--out", str(tmp_path), "--resume", "--overwrite"], "resume: expected one of"),
        (["--seeds", "0", "0"], "seeds: expected one or more different"),
        (["--lr", "0"], "lr: expected"),
        (["--device", "tpu"], "device: expected"),
    ]
    for extra, message in cases:
        assert main([*ARGUMENTS, *extra]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"retreever: {message}") and error.count("\n") == 1
    assert (folder.path / "config.json").read_text() == before
    assert main(["eval", str(tmp_path)]) == 2


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="other files"):
        RunFolder(tmp_path).start({}, resume=False, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


HOLD = """
import sys, time
from pathlib import Path
from retreever.train.run import RunFolder
RunFolder(Path(sys.argv[1])).start({"n": 8}, resume=False, overwrite=False)
print("started", flush=True)
time.sleep(60)
"""


def test_a_run_another_process_works_on_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "started\n"
    for way in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(ConfigError, match=r"^out: expected a run nobody works on, got .*run, in use"):
            folder.start({"n": 8}, **way)
    assert folder.config() == {"n": 8}
    other.kill()
    other.communicate()
    folder.start({"n": 8}, resume=True, overwrite=False)
    folder.start({"n": 16}, resume=False, overwrite=True)  # its own run a process may replace
    assert folder.config() == {"n": 16}


def test_a_finished_run_is_free(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start({"n": 8}, resume=False, overwrite=False)
    folder.finish({})
    folder.start({"n": 8}, resume=True, overwrite=False)  # looked at again
    code = HOLD.replace("overwrite=False", "overwrite=True").replace("time.sleep(60)", "")
    subprocess.run([sys.executable, "-c", code, str(folder.path)], check=True)


def test_a_damaged_checkpoint_says_how_to_go_on(tmp_path: Path) -> None:
    folder, trainer = RunFolder(tmp_path), a_trainer()
    save(folder, trainer)
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None
    os.truncate(newest / "tensors.safetensors", 100)
    with pytest.raises(CheckpointError, match=f"got 100; without {newest} the run goes on from an earlier one"):
        resume_from(folder, a_trainer())


if __name__ == "__main__":  # forking is cheap and safe here
    for name in (
        "torch._dynamo",
        "matplotlib.figure",
        "retreever.lab.recipes.command",
        "retreever.ops.search.launch_numba",
    ):
        import_module(name)
    torch.set_num_threads(1)
    kill_twice(Path(sys.argv[1]))
