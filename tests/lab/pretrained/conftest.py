"""A small copy model, trained for a moment, and its exported weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from retreever.cli import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("runs")
    steps = ["--steps", "8", "--batch", "16", "--warmup", "2", "--evaluate-every", "4", "--save-every", "8"]
    assert main(["train", "copy", "--n", "8", *steps, "--device", "cpu", "--out", str(out)]) == 0
    return out / "copy-8-tca-seed0"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="session")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights called tiny; not to be changed."""
    out = tmp_path_factory.mktemp("exported")
    assert main(["pretrained", "export", str(trained), "tiny", "--out", str(out)]) == 0
    return out


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A folder with weights called tiny, of the test's own."""
    return Path(shutil.copytree(exported, tmp_path / "weights"))
