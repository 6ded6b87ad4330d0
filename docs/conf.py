"""Settings of the documentation site. `make docs` builds it: Sphinx with MyST, so pages are the Markdown files here.

The source folder is the repository, whose links between files therefore work on the site as they do in a checkout.
"""

from pathlib import Path

from sphinx.application import Sphinx

from retreever import __version__

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
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "docs/templates", "docs/redirect", "docs/live"]
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
    "inherited-members": "Module, Exception, ValueError, RuntimeError, tuple",  # ours alone
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


def add_title(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages of benchmark results are tables alone; in the navigation they need a title, that of their file."""
    if name.startswith("benchmarks/results/") and not source[0].lstrip().startswith("# "):
        source[0] = f"# {name.rpartition('/')[2]}\n\n{source[0]}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx when it starts."""
    app.connect("source-read", add_title)
