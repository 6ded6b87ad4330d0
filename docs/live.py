"""Makes the live page for the documentation site, or says in one line what is missing. `make docs` runs it.

    python docs/live.py FOLDER [RUNTIME]

A page in the folder that is newer than the package is left as it is. RUNTIME is a copy of the npm package
onnxruntime-web, in place of fetching it with npm. The site is built with or without the page: what is
missing does not stop it.
"""

from __future__ import annotations

import shutil
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from retreever.errors import RetreeverError
from retreever.lab.page.build import build_page, is_page

SOURCES = (".py", ".js", ".html", ".css", ".safetensors", ".json")


def make_live(out: Path, runtime: Path | None = None) -> str:
    """Make the page in `out` if it is not there, or older than the package; returns why it could not be made."""
    if is_page(out) and _is_newer(out):
        return ""
    missing = _missing(runtime)
    if not missing:
        print("making the live page, once; it takes a minute or two", file=sys.stderr, flush=True)
        draft = out.with_name(f"{out.name}.draft")  # whole or not there: never half a page on the site
        try:
            build_page(draft, runtime, overwrite=True)
        except RetreeverError as error:
            missing = str(error)
    shutil.rmtree(out, ignore_errors=True)
    if not missing:
        draft.rename(out)
    return missing


def _is_newer(page: Path) -> bool:
    """Whether the page was made after every file of the package."""
    made = (page / "index.html").stat().st_mtime
    package = (file for file in Path(str(files("retreever"))).rglob("*") if file.suffix in SOURCES)
    return all(file.stat().st_mtime < made for file in package)


def _missing(runtime: Path | None) -> str:
    """What the page cannot be made without, and how to get it."""
    npm = "npm to fetch onnxruntime-web (Debian: apt-get install npm; or make docs RUNTIME=a copy of that package)"
    extra = "the extra export (.venv/bin/pip install -e '.[export]')"
    lost = [] if runtime is not None or shutil.which("npm") else [npm]
    lost += [] if all(map(find_spec, ("onnx", "onnxscript"))) else [extra]
    return f"needs {' and '.join(lost)}" if lost else ""


if __name__ == "__main__":
    why = make_live(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    if why:
        print(f"the site is built without the live page, docs/live-page.md says how to make it: {why}", file=sys.stderr)
