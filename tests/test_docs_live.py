"""What `make docs` does before it builds the site: the live page is made, or a line says what is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retreever.errors import BackendError
from retreever.files import write_text
from retreever.lab.page.build import MODELS, is_page

SCRIPT = Path(__file__).parent.parent / "docs" / "live.py"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a page that is made at once; `made` lists the folders."""
    spec = importlib.util.spec_from_file_location("live", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.made = []  # type: ignore[attr-defined]

    def build_page(out: Path, runtime: Path | None, overwrite: bool) -> None:
        module.made.append((out, runtime))
        for name in ("index.html", *(f"models/{model}/export.json" for model in MODELS)):
            write_text(out / name, "")

    monkeypatch.setattr(module, "build_page", build_page)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    return module


def test_the_page_is_made_once_and_again_when_the_package_has_changed(live: Any, tmp_path: Path) -> None:
    page = tmp_path / "live"
    assert live.make_live(page) == "" and is_page(page)
    assert live.make_live(page) == "" and len(live.made) == 1
    os.utime(page / "index.html", (0, 0))
    write_text(page / "left", "of the page before")
    assert live.make_live(page) == "" and len(live.made) == 2
    assert is_page(page) and [path.name for path in tmp_path.iterdir()] == ["live"] and not (page / "left").exists()


def test_what_is_missing_is_named(live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.shutil, "which", lambda name: None)
    said = live.make_live(tmp_path / "live")
    assert said.startswith("needs npm") and "apt-get install npm" in said and "export" not in said
    monkeypatch.setattr(live, "find_spec", lambda name: None)
    assert "needs npm" in (said := live.make_live(tmp_path / "live")) and "and the extra export (" in said
    assert live.make_live(tmp_path / "live", tmp_path).startswith("needs the extra export")
    assert live.made == [] and not (tmp_path / "live").exists()
    monkeypatch.setattr(live, "find_spec", lambda name: name)
    assert live.make_live(tmp_path / "live", tmp_path) == "" and live.made == [(tmp_path / "live.draft", tmp_path)]


def test_a_page_that_cannot_be_made_is_left_out(live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is one of an older version of the package, which would show something else than the site says."""

    def fail(*_: Any, **__: Any) -> None:
        raise BackendError("page: npm pack failed: no network")

    live.make_live(tmp_path / "live")
    os.utime(tmp_path / "live" / "index.html", (0, 0))
    monkeypatch.setattr(live, "build_page", fail)
    assert live.make_live(tmp_path / "live") == "page: npm pack failed: no network"
    assert not (tmp_path / "live").exists()
