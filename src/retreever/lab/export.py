"""Command line arguments of `retreever export`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Export:
    """Export a trained model as files that run without this package: `retreever export gp --n 48`."""

    what: Positional[str]
    """Name of pretrained weights, or folder of a run."""
    n: int
    """Most context points; fewer are given with a mask."""
    out: Path = Path("runs/export")
    """Folder for the files and export.json, which describes them."""
    format: Literal["onnx", "pt2", "aoti"] = "onnx"
    """ONNX, a program for torch.export.load, or compiled code for this kind of processor."""
    one: bool = False
    """One file, predict, in place of encode and query."""
    budget: int | None = None
    """Tokens a query may read; by default what the model was trained with."""
    any_budget: bool = False
    """The file query takes the budget as an input, up to --budget."""
    explain: bool = False
    """The file query also returns attention weights and the policy."""
    batch: int | None = 1
    """Contexts in a call; None is any number."""
    weights: Path | None = None
    """Folder of weights made by `retreever pretrained export`; by default the weights in the package."""
    overwrite: bool = False
    """Replace the files of an earlier export."""

    @property
    def is_run(self) -> bool:
        """Whether `what` is a run, not a name: a path, or a folder with the settings of one."""
        what = Path(self.what)
        return self.weights is None and (len(what.parts) > 1 or (what / "config.json").exists())

    def run(self) -> None:
        """Write the files and print their sizes."""
        from retreever.deploy.api import export
        from retreever.lab.recipes.command import load_run
        from retreever.pretrained.load import load_pretrained

        found = export(
            load_run(Path(self.what))[1] if self.is_run else load_pretrained(self.what, self.weights),
            self.out,
            n=self.n,
            format=self.format,
            one=self.one,
            budget=self.budget,
            any_budget=self.any_budget,
            explain=self.explain,
            batch=self.batch,
            overwrite=self.overwrite,
        )
        for name, file in found.files.items():
            print(f"written: {file} ({found.about['files'][name]['bytes'] / 1e6:.2f} MB)")
        print(f"written: {found.folder / 'export.json'}")
