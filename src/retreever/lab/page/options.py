"""Command line arguments of `retreever page`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Page:
    """Make a page that runs the gp and emnist models in a browser and shows their searches; no server is needed.

    The page is a folder for any static web server. Making it takes a minute or two and needs `npm`, which fetches
    onnxruntime-web, and the extra `export`.
    """

    out: Path = Path("runs/page")
    """Folder of the page."""
    serve: bool = False
    """Serve the page on 127.0.0.1 until Ctrl-C; it is made first if the folder has none."""
    port: int = 8000
    """Port to serve on; 0 takes any free one."""
    runtime: Path | None = None
    """A copy of the npm package onnxruntime-web, a folder or its .tgz, in place of fetching it."""
    overwrite: bool = False
    """Replace a page made earlier."""

    def run(self) -> None:
        """Make or serve the page."""
        from retreever.lab.page.build import build_page, is_page
        from retreever.lab.page.serve import check_port, serve_page

        check_port(self.port)
        if not self.serve or self.overwrite or not is_page(self.out):
            size = build_page(self.out, self.runtime, self.overwrite)
            print(f"written: {self.out}/index.html and what it loads, {size / 1e6:.1f} MB in all")
        if self.serve:
            serve_page(self.out, self.port)
