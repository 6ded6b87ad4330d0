"""The weights in the package: whole, small, free to be given on, documented, and unchanged by changes of the code."""

from __future__ import annotations

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

import retreever
from retreever.lab.pretrained.page import make_page, read_cards
from retreever.lab.pretrained.probe import probe
from retreever.lab.recipes.recipe import recipe_from_json
from retreever.models.saved import model_from_json, model_to_json
from retreever.pretrained.card import MAX_BYTES, TOLERANCE, pretrained_names, read_card, weights_folder
from retreever.pretrained.load import load_weights

ROOT = Path(__file__).parents[3]
PLANNED = {"copy-256", "copy-1024", "gp", "gp-lbanp", "gp-tnpd", "emnist", "activity"}


def test_only_weights_and_their_cards_are_in_the_package() -> None:
    names = pretrained_names()
    place = weights_folder()
    files = {file.name for file in place.iterdir()} if place.is_dir() else set()
    assert set(names) <= PLANNED
    assert files == {f"{name}.{kind}" for name in names for kind in ("json", "safetensors")}


@pytest.mark.parametrize("name", pretrained_names())
def test_shipped_weights_are_what_their_card_says(name: str) -> None:
    card = read_card(name)
    model, recipe = load_weights(card), recipe_from_json(card.settings)
    task = recipe.task
    assert card.size < MAX_BYTES and card.tolerance <= TOLERANCE and task.name != "celeba" and not recipe.quick
    assert name in (task.name, f"{task.name}-{recipe.model.model}", f"copy-{task.context * 2}")
    settings = model_to_json(model)
    assert model_to_json(recipe.make_model()) == settings
    assert model_to_json(model_from_json(card.model)) == settings  # settings that came later have their defaults
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert card.tokens == model.tokens(card.context) and card.metric == task.metric
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
