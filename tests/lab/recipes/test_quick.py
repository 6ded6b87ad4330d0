"""`--quick` of every task and model, from the command line: it learns, leaves its files and pictures, is scored again.

Data files are small and made up, in the official formats; runs are cut to a few seconds.
"""

from __future__ import annotations

import gzip
import json
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retreever.cli import main
from retreever.lab.figures import style
from retreever.lab.recipes import command, figures
from retreever.lab.recipes.command import load_run
from retreever.tasks import gp
from retreever.tasks.copy import CopyTask
from retreever.tasks.images import ImageTask
from retreever.train import evaluate

PIL = pytest.importorskip("PIL.Image")
TAGS = ("010-000-024-033", "010-000-030-096", "020-000-033-111", "020-000-032-221")
STEPS = {"copy": 40, "gp": 24, "emnist": 16, "celeba": 16, "activity": 24}
CASES = [(task, model) for task in STEPS for model in ("retreever", "transformer-ca", "perceiver-io")]
SMALLER = {"np": ["--dim", "32"], "tnpd": ["--dim", "32"], "lbanp": [], "latent-ode-rnn": ["--batch", "2"]}
CASES += zip(("gp", "emnist", "celeba", "activity"), SMALLER, strict=True)


def bump(size: int, generator: np.random.Generator) -> np.ndarray:
    """A grey picture with one bright disc on black."""
    row, column = generator.uniform(0.3, 0.7, 2) * size
    rows, columns = np.mgrid[:size, :size]
    return np.where((rows - row) ** 2 + (columns - column) ** 2 < (size / 4) ** 2, 220, 10).astype(np.uint8)


def write_emnist(folder: Path, generator: np.random.Generator) -> None:
    folder.mkdir()
    for part, count in (("train", 1_700), ("test", 60)):
        images = np.stack([bump(28, generator) for _ in range(60)])[np.arange(count) % 60]
        labels = (np.arange(count) % 12).astype(np.uint8)
        labels[: count // 2] %= 10
        labels[labels >= 10] -= 0 if part == "test" else 10
        name = f"emnist-balanced-{part}"
        images_header, labels_header = struct.pack(">4i", 2051, count, 28, 28), struct.pack(">2i", 2049, count)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images_header + images.tobytes(), 1))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels_header + labels.tobytes(), 1))


def write_celeba(folder: Path, generator: np.random.Generator) -> None:
    (folder / "img_align_celeba").mkdir(parents=True)
    lines = []
    for number, part in enumerate([0] * 40 + [1] * 8 + [2] * 8, 1):
        picture = np.repeat(bump(48, generator)[..., None], 3, axis=2)
        PIL.fromarray(picture).save(folder / "img_align_celeba" / f"{number:06}.jpg", quality=90)
        lines.append(f"{number:06}.jpg {part}\n")
    (folder / "list_eval_partition.txt").write_text("".join(lines))


def write_activity(folder: Path, generator: np.random.Generator) -> None:
    """Five recordings; where a person is tells what they do."""
    folder.mkdir()
    lines = []
    for recording in range(5):
        for point in range(400):
            label, height = (("walking", 1.0), ("lying", 0.1))[point // 40 % 2]
            x, y, z = generator.normal((2, 2, height), 0.05)
            tick = 633790226051280329 + point * 270_000
            where = f"{TAGS[point % 4]},{tick},27.05.2009 14:03:25:127,{x},{y},{z}"
            lines.append(f"A0{recording + 1},{where},{label}\n")
    (folder / "ConfLongDemo_JSI.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, generator = tmp_path_factory.mktemp("datasets"), np.random.default_rng(0)
    write_emnist(root / "emnist", generator)
    write_celeba(root / "celeba", generator)
    write_activity(root / "person_activity", generator)
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of the first batches of every set, which alone are drawn; pictures are small."""
    monkeypatch.setattr(figures, "IMAGES", 1)
    monkeypatch.setattr(style, "DPI", 40)
    monkeypatch.setattr(command, "QUICK_BATCHES", 2)
    drawn = gp._fixed_set
    monkeypatch.setattr(gp, "_fixed_set", lambda task, purpose, batches: drawn(task, purpose, min(10, batches)))
    for task in (CopyTask, ImageTask):
        every: Any = task.validation
        monkeypatch.setattr(task, "validation", lambda *args, every=every, **sizes: islice(every(*args, **sizes), 10))


@pytest.mark.parametrize(("task", "model"), CASES)
def test_quick_learns(task: str, model: str, data: Path, tmp_path: Path) -> None:
    if task == "copy":
        model = {"retreever": "tca", "transformer-ca": "ca"}.get(model, model)
    arguments = ["train", task, "--quick", "--model", model, "--data", str(data), "--out", str(tmp_path)]
    few = ["--steps", str(STEPS[task]), "--warmup", "10", "--evaluate-every", str(STEPS[task] // 2)]
    assert main([*arguments, *few, *SMALLER.get(model, []), "--device", "cpu"]) == 0
    (folder,) = tmp_path.iterdir()
    files = {file.name for file in folder.iterdir()}
    assert files >= {"config.json", "metrics.jsonl", "result.json", "checkpoints", "curves.png"}
    assert files & {"predictions.png", "retrieval.png"} or (task == "copy" and model != "tca")
    recipe, trained, _ = load_run(folder)
    torch.manual_seed(1)
    problem, fresh = recipe.task.make(data), recipe.make_model()
    start = evaluate(fresh, problem, problem.validation())
    result = json.loads((folder / "result.json").read_text())
    assert result["validation"] > start and (result.get("evaluations") == 49) == (model == "latent-ode-rnn")
    assert evaluate(trained, problem, problem.validation()) == pytest.approx(result["validation"], abs=1e-4)
    if model == "perceiver-io":  # one model of every task; scoring is the same for all
        assert main(["eval", str(folder), "--data", str(data), "--device", "cpu"]) == 0
