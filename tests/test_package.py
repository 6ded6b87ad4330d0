"""What is published: the source archive holds the whole repository, the wheel the whole package, and what a package
index shows leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
NOT_PUBLISHED = {".ci/run"}  # for this repository alone


class Published(NamedTuple):
    """Names of the files in both archives, and the metadata that a package index shows."""

    source: set[str]
    wheel: set[str]
    metadata: Message


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    pytest.importorskip("hatchling", reason="hatchling builds the package: pip install '.[dev]'")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True, timeout=120)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        wheel = set(archive.namelist())
        metadata = next(name for name in wheel if name.endswith(".dist-info/METADATA"))
        return Published(source, wheel, message_from_bytes(archive.read(metadata)))


def tracked_files() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        pytest.skip("this is no git checkout, so nothing says which files belong to it")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_source_archive_holds_every_file_of_the_repository(published: Published) -> None:
    """So its tests can be collected and run: they read experiments, benchmarks, examples and documents."""
    assert tracked_files() - published.source == NOT_PUBLISHED


def test_the_wheel_holds_the_whole_package_and_nothing_else(published: Published) -> None:
    package = {name for name in published.wheel if ".dist-info/" not in name}
    source = {name.removeprefix("src/") for name in published.source if name.startswith("src/retreever/")}
    assert package == source
    assert {"retreever/py.typed", "retreever/pretrained/weights/gp.safetensors"} <= package


def test_nothing_shown_by_a_package_index_leads_to_a_file_that_is_not_there(published: Published) -> None:
    """The index has the text of the README, not its files: links and images are addresses below the home page."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    assert f"Homepage, {home}" in (published.metadata.get_all("Project-URL") or [])
    targets = re.findall(r"\]\(([^)\s]+)\)", str(published.metadata.get_payload()))
    local = [target for target in targets if not target.startswith(("#", "https://"))]
    named = [target.removeprefix(f"{home}/").partition("#")[0] for target in targets if target.startswith(home)]
    assert local == [] and len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert any(name.endswith(".png") for name in named)
