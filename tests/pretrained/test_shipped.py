"""The weights in the package: whole, small, free to be given on, documented, and unchanged by changes of the code."""

from __future__ import annotations

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

import retreever
from retreever.pretrained.card import MAX_BYTES, TOLERANCE, pretrained_names, read_card, weights_folder
from retreever.pretrained.load import load_weights
from retreever.pretrained.page import make_page, read_cards
from retreever.pretrained.probe import probe

ROOT = Path(__file__).parents[2]
PLANNED = {"copy-256", "copy-1024", "gp", "emnist", "activity"}


def test_only_weights_and_their_cards_are_in_the_package() -> None:
    names = pretrained_names()
    place = weights_folder()
    files = {file.name for file in place.iterdir()} if place.is_dir() else set()
    assert set(names) <= PLANNED
    assert files == {f"{name}.{kind}" for name in names for kind in ("json", "safetensors")}


@pytest.mark.parametrize("name", pretrained_names())
def test_shipped_weights_are_what_their_card_says(name: str) -> None:
    card = read_card(name)
    settings, model = load_weights(card)
    assert card.size < MAX_BYTES and card.tolerance <= TOLERANCE and settings.task != "celeba" and not settings.quick
    assert name.split("-")[0] == settings.task and name in (settings.task, f"copy-{settings.context * 2}")
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert card.tokens == model.tokens(card.context) and card.metric == settings.metric
    assert probe(model) == pytest.approx(card.probe, rel=1e-8, abs=1e-8)


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the repository")
def test_the_page_is_made_from_the_cards() -> None:
    """If this fails: retreever pretrained page."""
    assert (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8") == make_page(read_cards())


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the repository")
def test_the_wheel_has_the_weights(exported: Path, tmp_path: Path) -> None:
    wheels = pytest.importorskip("hatchling.builders.wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "retreever"
    shutil.copytree(Path(retreever.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(exported, package / "pretrained" / "weights", dirs_exist_ok=True)
    (wheel,) = wheels.WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    inside = set(ZipFile(wheel).namelist())
    names = [*pretrained_names(), "tiny"]
    assert {f"retreever/pretrained/weights/{n}.{kind}" for n in names for kind in ("json", "safetensors")} <= inside
