"""The documentation site: it builds without warnings, no link on it is broken, every public name has a page, the live
page is inside, and the notebook runs and prints what it shows."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import retreever
import retreever.train
from retreever.lab.page.build import MODELS, is_page
from retreever.lab.page.runtime import FILES

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build_site(out: Path, **settings: str) -> Path:
    """Build as `make docs` does, with a plain theme, which takes half the time."""
    pytest.importorskip("myst_nb", reason="the site is built by Sphinx: pip install '.[docs]'")
    settings = {"html_theme": "basic", "html_use_index": "0", "html_copy_source": "0"} | settings
    given = [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", *given, "-c", "docs", ".", out]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The live page with its own files, an empty runtime and empty models."""
    out = tmp_path_factory.mktemp("live")
    shutil.copytree(str(files("retreever").joinpath("lab", "page", "site")), out, dirs_exist_ok=True)
    for name in (*(f"vendor/{name}" for name in FILES), *(f"models/{name}/export.json" for name in MODELS)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, live: Path) -> Path:
    """The whole site, with the live page inside."""
    pytest.importorskip("botorch", reason="the API pages import botorch: pip install '.[botorch]'")
    return build_site(tmp_path_factory.mktemp("site"), live_page=str(live))


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


@pytest.mark.parametrize("module", [retreever, retreever.train], ids=lambda module: module.__name__)
def test_every_public_name_has_a_page(module: Any, site: Path) -> None:
    names = {f"{module.__name__}.{name}" for name in module.__all__} - {"retreever.__version__"}
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (site / "docs" / "api" / "names").iterdir()}
    assert names <= set(pages)
    assert [name for name in names if f'id="{name}"' not in pages[name]] == []


def imported_names() -> set[tuple[str, str]]:
    """Modules and names that the pages and the notebooks import from the package."""
    code = [block for path in PAGES for block in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.S)]
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text("utf-8"))["cells"]]
    code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, node.names) for node in found if node.module and node.module.split(".")[0] == "retreever"]
    return {(module, alias.name) for module, names in ours for alias in names} - {("retreever", "__version__")}


def is_documented(module: str, name: str, known: set[str]) -> bool:
    """Whether the name is described, there or in a package above, from which it can be imported as well."""
    pytest.importorskip("matplotlib")
    wanted = getattr(import_module(module), name)
    parts = module.split(".")
    above = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    return any(f"{place}.{name}" in known and getattr(import_module(place), name) is wanted for place in above)


def test_every_name_that_pages_import_is_described(site: Path) -> None:
    pages = [*(site / "docs" / "api").rglob("*.html")]
    known = {anchor for path in pages for anchor in Page(path).anchors}
    names = imported_names()
    assert {("retreever", "ReTreever"), ("retreever.train", "fit"), ("retreever.botorch", "to_botorch")} <= names
    assert [name for name in sorted(names) if not is_documented(*name, known)] == []
    assert not is_documented("retreever.train.config", "Schedule", known)


def test_the_live_page_is_inside_the_site(site: Path, live: Path) -> None:
    assert "../live/index.html" in Page(site / "docs" / "live-page.html").links
    inside = {str(path.relative_to(site / "live")) for path in (site / "live").rglob("*")}
    assert inside == {str(path.relative_to(live)) for path in live.rglob("*")}


def test_without_the_live_page_the_site_says_how_to_make_it(live: Path, tmp_path: Path) -> None:
    """And a site that was built with it before leads nowhere wrong."""
    alone = {"root_doc": "docs/live-page", "include_patterns": "docs/live-page.md"}
    alone |= {"suppress_warnings": "myst.xref_missing"}  # the pages it leads to
    made = is_page(ROOT / "build" / "live")  # what `make docs` left
    cases = [({"live_page": str(live)}, True), ({"live_page": str(tmp_path / "none")}, False), ({}, made)]
    for given, there in cases:
        site = build_site(tmp_path / "site", **alone, **given)
        page = site / "docs" / "live-page.html"
        text = re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))
        assert ("../live/index.html" in Page(page).links) == there
        assert ("built without the page" in text) != there and "retreever page --out page" in text
        assert (site / "live" / "index.html").exists() == there


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
