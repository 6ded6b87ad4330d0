"""The documentation site: it builds without warnings, no link on it is broken, every public name has a page, and the
notebook runs and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import retreever

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does, with a plain theme, which takes half the time."""
    pytest.importorskip("myst_nb", reason="the site is built by Sphinx: pip install '.[docs]'")
    pytest.importorskip("botorch", reason="the API pages import botorch: pip install '.[botorch]'")
    out = tmp_path_factory.mktemp("site")
    plain = ["-D", "html_theme=basic", "-D", "html_use_index=0", "-D", "html_copy_source=0"]
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", *plain, "-c", "docs", ".", out]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return out


class Page(HTMLParser):
    """Links of a page and the places in it that links can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value and not re.match(r"[a-z]+:|//", value):
                self.links.add(value)


def broken_links(site: Path) -> list[str]:
    """Links to files or places in pages that are not there, as 'page: link'."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            name, _, anchor = unquote(link.partition("?")[0]).partition("#")
            target = (path.parent / name).resolve() if name else path
            known = anchor in pages[target].anchors if target in pages and anchor else target.is_file()
            if not known:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def test_the_site_builds_without_warnings_and_without_broken_links(site: Path) -> None:
    assert broken_links(site) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    text = '<h1 id="a"></h1><a href="#a"></a><a href="#b"></a><a href="gone.html"></a><img src="https://example.org/x">'
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    assert broken_links(tmp_path) == ["page.html: #b", "page.html: gone.html"]


def test_every_public_name_has_a_page(site: Path) -> None:
    names = {f"retreever.{name}" for name in retreever.__all__} - {"retreever.__version__"}
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (site / "docs" / "api" / "names").iterdir()}
    assert names <= set(pages)
    assert [name for name in names if f'id="{name}"' not in pages[name]] == []


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, and prints what it shows."""
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient: pip install '.[dev]'")
    pytest.importorskip("ipykernel", reason="notebooks are run by ipykernel: pip install '.[dev]'")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    shown = nbformat.read(path, as_version=4)
    run = nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=200, kernel_name="python3").execute()
    pairs = zip(shown.cells, run.cells, strict=True)
    assert all(printed(one) == printed(two) for one, two in pairs if one.cell_type == "code")
    assert any("image/png" in output.get("data", {}) for cell in run.cells for output in cell.get("outputs", []))
