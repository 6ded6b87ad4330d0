"""Runs killed at any file operation, alone or as two processes, resume to the bytes of a run left in peace.

`python tests/train/test_kills.py 200 FOLDER` kills as often as asked and prints what was found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from retreever.batch import Batch
from retreever.lab.recipes.recipe import make_recipe
from retreever.tasks.copy import CopyTask
from retreever.train.distributed import Ranks
from retreever.train.engine import Trainer
from retreever.train.run import RunFolder
from retreever.train.together import train_in

RECIPE = make_recipe(
    "copy", n=4, dim=8, hidden=8, steps=6, batch=2, warmup=2, evaluate_every=2, save_every=2, dropout=0.1
)
KILLED = 77


class Brief(CopyTask):
    """The copy task, with a validation set of one batch."""

    def validation(self) -> Iterator[Batch]:
        return islice(super().validation(), 1)


def train(path: Path, ranks: Ranks) -> None:
    """A run from start or newest checkpoint to its result, as the command line does it."""
    torch.set_num_threads(1)
    if ranks.world > 1:
        store = dist.FileStore(str(path) + f".{os.getppid()}.store", ranks.world)
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world)
    folder = RunFolder(path)
    if ranks.first:
        folder.start(RECIPE.to_json(), resume=True, overwrite=False)
    ranks.wait()
    torch.manual_seed(7)
    history = train_in(folder, Trainer(RECIPE.make_model(), Brief(4), RECIPE.train, ranks=ranks))
    if ranks.first:
        folder.finish({"history": [row | {"seconds": 0} for row in map(asdict, history)]})
    ranks.wait()


def attempt(path: Path, world: int, moment: int | None = None) -> tuple[int, int]:
    """Exit status of the first process, killed before file operation `moment`, and how many operations it did."""
    counter, children = os.pipe(), []
    for rank in range(world):
        if (child := os.fork()) == 0:
            try:
                if rank == 0:
                    count_operations(path, counter[1], moment)
                train(path, Ranks(rank, world))
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__} {error}", file=sys.stderr)
                os._exit(1)
        children.append(child)
    os.close(counter[1])
    with os.fdopen(counter[0], "rb") as stream:
        operations = len(stream.read())
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path(str(path) + f".{os.getpid()}.store").unlink(missing_ok=True)
    return statuses[0], operations


def count_operations(path: Path, counter: int, moment: int | None) -> None:
    """Report every file operation below `path` by one byte, and end at number `moment` as SIGKILL would."""
    done = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event.startswith(("open", "os.", "shutil.")) and any(str(path) in str(word) for word in arguments):
            if done == moment:
                os._exit(KILLED)
            done += 1
            os.write(counter, b".")

    sys.addaudithook(see)


def contents(path: Path) -> dict[str, bytes]:
    """All files of a run, without wall-clock times, names and what follows from them."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in (".lock", "manifest.json"):
            data = file.read_bytes()
            if file.suffix in (".json", ".jsonl"):
                rows = [json.loads(line) for line in (data.splitlines() if file.suffix == ".jsonl" else [data])]
                data = json.dumps([without_times(row) for row in rows]).encode()
            found[str(file.relative_to(path))] = data
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in ("seconds", "run")}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def kill(times: int, root: Path) -> dict[str, int]:
    """Kill runs at `times` moments spread over all file operations, half of them runs of two processes."""
    found = {"kills": 0, "equal": 0}
    for world in (1, 2):
        whole = root / f"whole{world}"
        status, operations = attempt(whole, world)
        assert status == 0, f"{world} processes failed"
        expected = contents(whole)
        assert len(expected) == 9, sorted(expected)
        share = times // 2
        for number in range(share):
            path = root / "run"
            status, _ = attempt(path, world, moment=number * operations // share)
            found["kills"] += status == KILLED
            for line in (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").exists() else ():
                json.loads(line)
            assert attempt(path, world)[0] == 0, f"{world} processes, killed at {number * operations // share}"
            now = contents(path)
            found["equal"] += now == expected
            for name in sorted(now.keys() | expected.keys()):
                if now.get(name) != expected.get(name):
                    print(
                        f"{world} processes, killed at {number * operations // share}: {name} differs", file=sys.stderr
                    )
            shutil.rmtree(path)
    return found


@pytest.mark.timeout(120)
def test_killed_at_any_file_operation_runs_resume_to_the_same_bytes(tmp_path: Path) -> None:
    """In a process of its own, from which forking is cheap and safe; 200 kills: see docs/reliability.md."""
    command = [sys.executable, __file__, "8", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"kills": 8, "equal": 8}


if __name__ == "__main__":
    import torch._dynamo

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # modules and kernels are loaded here, once, not in every child
        train(Path(warm) / "run", Ranks(0, 1))
    print(json.dumps(kill(int(sys.argv[1]), Path(sys.argv[2]))))
