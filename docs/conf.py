"""Settings of the documentation site. `make docs` builds it: Sphinx with MyST, so pages are the Markdown files here.

The source folder is the repository, whose links between files therefore work on the site as they do in a checkout.
"""

import shutil
from inspect import cleandoc
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from retreever import __version__
from retreever.lab.page.build import is_page

project, author, copyright = "retreever", "the authors of retreever", "the authors of retreever"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**",
    "benchmarks/**",
    "experiments/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "docs/templates", "docs/redirect"]
templates_path = [str(Path(__file__).parent / "templates")]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # a test runs the notebook and compares its output
suppress_warnings = ["myst.header"]  # results pages are parts of others and start below the first level

default_role = "py:obj"  # `ReTreever` in a docstring links to its page
autosummary_generate = True
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "inherited-members": "Module, BaseException, Exception, ValueError, RuntimeError, tuple",  # ours alone
}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_attr_annotations = False  # shapes in annotations are not reStructuredText
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"retreever {__version__}"
html_extra_path = ["redirect"]
html_show_copyright = False
live_page = str(Path(__file__).parents[1] / "build" / "live")  # where `make docs` makes it, if it can


def add_title(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages of benchmark results are tables alone; in the navigation they need a title, that of their file."""
    if name.startswith("benchmarks/results/") and not source[0].lstrip().startswith("# "):
        source[0] = f"# {name.rpartition('/')[2]}\n\n{source[0]}"


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a property's docstring for its type; here it is a sentence."""
    if what == "property" and obj.__doc__:
        lines[:] = [*cleandoc(obj.__doc__).splitlines(), ""]


INSIDE = """**<a href="../live/index.html">Open the live page.</a>** If you read this site as files on your disk, serve
it first, as browsers load no models from files: `python -m http.server -d build/site`."""
OUTSIDE = "This copy of the site was built without the page. These commands make it:"


def link_live_page(app: Sphinx, name: str, source: list[str]) -> None:
    """The page about the live page leads to it, where it is part of the site."""
    if name == "docs/live-page":
        source[0] = source[0].replace("<!-- link -->", INSIDE if is_page(Path(app.config.live_page)) else OUTSIDE)


def copy_live_page(app: Sphinx, failed: Exception | None) -> None:
    """Put the live page into the site, or take out one of an earlier build."""
    if failed is None and app.builder.format == "html":
        shutil.rmtree(app.outdir / "live", ignore_errors=True)
        if is_page(Path(app.config.live_page)):
            shutil.copytree(app.config.live_page, app.outdir / "live")


def setup(app: Sphinx) -> None:
    """Called by Sphinx when it starts."""
    app.add_config_value("live_page", "", "")
    app.connect("source-read", add_title)
    app.connect("source-read", link_live_page)
    app.connect("env-get-outdated", lambda *_: ["docs/live-page"])  # read again: the page may have been made since
    app.connect("autodoc-process-docstring", keep_colons, priority=600)  # after napoleon
    app.connect("build-finished", copy_live_page)
