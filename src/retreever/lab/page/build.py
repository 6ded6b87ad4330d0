"""Makes the page: its own files, the exported models and the runtime, all in one folder."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from retreever.deploy.api import export
from retreever.errors import ConfigError
from retreever.files import write_bytes
from retreever.lab.page.runtime import FILES, vendor
from retreever.pretrained.load import load_pretrained

MODELS = {"gp": (48, 48), "emnist": (200, 64)}  # context points, and the largest budget


def is_page(folder: Path) -> bool:
    """Whether the folder holds a complete page."""
    needed = ("index.html", *(f"models/{name}/export.json" for name in MODELS))
    return all((folder / name).exists() for name in needed)


def build_page(out: Path, runtime: Path | None = None, overwrite: bool = False) -> int:
    """Write the page into `out`; returns its size in bytes."""
    if (out / "index.html").exists() and not overwrite:
        raise ConfigError(f"out: expected a folder without a page, got {out} (--overwrite)")
    site = {out / file.name: file.read_bytes() for file in files("retreever").joinpath("lab", "page", "site").iterdir()}
    there = [file for file in site if file.exists()]
    for file in there:
        if not overwrite and (not file.is_file() or file.read_bytes() != site[file]):
            raise ConfigError(f"out: expected a folder without other files, got {file} (--overwrite replaces it)")
    vendor(out / "vendor", runtime)
    written = [out / "vendor" / name for name in FILES]
    written += [write_bytes(file, data) for file, data in site.items() if file.name != "index.html"]
    for name, (n, budget) in MODELS.items():
        print(f"exporting {name} for up to {n} points", file=sys.stderr, flush=True)
        found = export(
            load_pretrained(name),
            out / "models" / name,
            n=n,
            budget=budget,
            any_budget=True,
            explain=True,
            overwrite=overwrite or bool(there),  # a page that was stopped half-way is finished
        )
        written += [*found.files.values(), found.folder / "export.json"]
    written.append(write_bytes(out / "index.html", site[out / "index.html"]))  # last: now the page is whole
    return sum(file.stat().st_size for file in written)
