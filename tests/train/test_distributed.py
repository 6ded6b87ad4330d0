"""Several processes are one run: same losses, same weights, and only the first one writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from retreever.cli import main
from retreever.errors import ConfigError
from retreever.train.checkpoint import latest_checkpoint, load_checkpoint
from retreever.train.distributed import Ranks
from retreever.train.run import RunFolder

NAME = "copy-8-tca-ce-seed0"
ARGUMENTS = [
    "train", "copy", "--n", "8", "--steps", "12", "--batch", "8", "--warmup", "4", "--evaluate-every", "1",
    "--save-every", "5", "--dropout", "0", "--device", "cpu",
    "--reward", "cross-entropy",  # accuracy jumps where two classes are as likely, and a rounding error decides
]  # fmt: skip


def start_two(out: Path, *extra: str) -> subprocess.Popen[str]:
    """The run as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    command = [*launcher, "retreever", *ARGUMENTS, *extra, "--out", str(out)]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / NAME / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_equal_one_with_the_same_global_batch(tmp_path: Path) -> None:
    two_processes = start_two(tmp_path / "2")
    assert main([*ARGUMENTS, "--out", str(tmp_path / "1")]) == 0
    _, error = two_processes.communicate(timeout=120)
    assert two_processes.returncode == 0, error[-2000:]
    newest = [latest_checkpoint(RunFolder(tmp_path / p / NAME).checkpoints) for p in "12"]
    one, two = (load_checkpoint(path)[0] for path in newest if path is not None)
    weights = [name for name in one if name.startswith("model.")]
    assert max(float((one[name] - two[name]).abs().max()) for name in weights) <= 1e-5
    rows = [json.loads((tmp_path / p / NAME / "result.json").read_text()) for p in "12"]
    assert abs(rows[0]["test"] - rows[1]["test"]) < 0.5
    for single, double in zip(losses(tmp_path / "1"), losses(tmp_path / "2"), strict=True):
        assert abs(single - double) <= 1e-6


def test_a_dead_process_ends_the_job_and_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    job = start_two(tmp_path, "--steps", "100000")
    folder = RunFolder(tmp_path / NAME)
    deadline = time.monotonic() + 60
    while latest_checkpoint(folder.checkpoints) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, error = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "SIGKILL" in error or "exitcode: -9" in error or "lost the others" in error
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None
    load_checkpoint(newest)


def rank_pids(job: subprocess.Popen[str]) -> list[int]:
    """Process numbers of all ranks, by rank."""
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    pids: dict[int, int] = {}
    for child in children:
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                pids[int(entry.removeprefix(b"RANK="))] = int(child)
    return [pids[rank] for rank in sorted(pids)]


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    """All save: the dropout of each is in the checkpoint. (That it resumes to the bit: test_kills.py.)"""
    options = ("--dropout", "0.1", "--steps", "100000", "--save-every", "100000", "--evaluate-every", "20")
    job = start_two(tmp_path, *options)
    folder = RunFolder(tmp_path / NAME)
    deadline = time.monotonic() + 60
    while not folder.metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(rank_pids(job)[1], signal.SIGTERM)
    _, error = job.communicate(timeout=60)
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None
    tensors, state = load_checkpoint(newest)
    assert 20 <= state["step"] < 100_000 and state["processes"] == 2
    assert error.count(f"stopped by SIGTERM after step {state['step']}; ") == 2
    assert tensors["random.dropout"].shape[0] == 2
    assert not torch.equal(*tensors["random.dropout"])


def test_rows_are_shared_out_evenly_and_odd_batches_refused() -> None:
    ranks = [Ranks(rank, 4) for rank in range(4)]
    rows = torch.arange(8)
    assert torch.equal(torch.cat([rows[r.rows(8)] for r in ranks]), rows)
    with pytest.raises(ConfigError, match=r"^batch: expected a multiple of the 4 processes, got 6$"):
        ranks[0].check(6)
