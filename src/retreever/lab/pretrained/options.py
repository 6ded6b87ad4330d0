"""Command line arguments of `retreever eval` and `retreever pretrained`. Does not import torch."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from retreever.arguments import reject
from retreever.lab.commands import group, one_of


@dataclass(frozen=True)
class Evaluate:
    """Score a trained run on its test set, pretrained weights (`retreever eval --pretrained gp`), or the exact
    posterior (`retreever eval gp --model oracle`)."""

    what: Positional[Path | None] = None
    """Folder of a run, or gp."""
    checkpoint: Literal["best", "last"] = "best"
    """Which weights: those that did best on validation, or the newest."""
    data: Path | None = None
    """Folder that holds the datasets."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    model: Literal["trained", "oracle"] = "trained"
    """oracle is the exact posterior of a Gaussian process that knows its hyperparameters."""
    kernel: Literal["rbf", "matern", "periodic"] = "rbf"
    """Kernel of the oracle."""
    pretrained: str = ""
    """Name of pretrained weights to score and compare with their card; `retreever pretrained list` shows the names."""
    weights: Path | None = None
    """Folder of weights made by `retreever pretrained export`; by default the weights in the package."""
    budget: int | None = None
    """Tokens a query may read, in place of what the run was trained with; 1 reads one path."""

    def run(self) -> int:
        """Print the scores; returns 1 when those of a card were not reproduced, else 0."""
        from retreever.lab.recipes.command import evaluate_oracle, evaluate_pretrained, evaluate_run

        if self.pretrained:
            if self.what is not None or self.model == "oracle":
                reject("pretrained", "either a run, an oracle or pretrained weights", f"{self.pretrained!r} and more")
            return evaluate_pretrained(self.pretrained, self.weights, self.data, self.device, self.budget)
        if self.weights is not None:
            reject("weights", "--pretrained NAME with it", "none")
        if self.what is None:
            reject("what", "the folder of a run, or --pretrained NAME", "none")
        if self.model == "trained":
            evaluate_run(self.what, self.checkpoint, self.data, self.device, self.budget)
        elif self.budget is not None:
            reject("budget", "a trained model that searches a tree", "the exact posterior")
        elif str(self.what) == "gp":
            evaluate_oracle(self.kernel)
        else:
            reject("what", "gp, the task whose exact posterior is known", repr(str(self.what)))
        return 0


@dataclass(frozen=True)
class PretrainedList:
    """Print a table of the available weights."""

    weights: Path | None = None
    """Folder of exported weights; by default the weights in the package."""
    json: bool = False
    """The cards as JSON, for programs."""

    def run(self) -> None:
        """Print the table or the JSON."""
        from retreever.lab.pretrained.page import cards_table, read_cards

        cards = read_cards(self.weights)
        if self.json:
            print(json_text.dumps([asdict(card) for card in cards], indent=1))
        elif not cards:
            print(f"no weights in {self.weights or 'the package'}")
        else:
            cards_table(cards).show()


@dataclass(frozen=True)
class PretrainedExport:
    """Export weights from a finished run: NAME.safetensors and its card, NAME.json."""

    source: Positional[Path]
    """Folder of the run."""
    name: Positional[str]
    """Name of the weights."""
    out: Path = Path("weights")
    """Folder for both files."""
    data_note: str = ""
    """What the data files were: --data-note "EMNIST (re-drawn split)"; generated data need no note."""
    overwrite: bool = False
    """Replace weights of that name."""

    def run(self) -> None:
        """Write both files."""
        from retreever.lab.pretrained.export import export_run

        print(f"written: {export_run(self.source, self.name, self.out, self.data_note, self.overwrite)}")


@dataclass(frozen=True)
class PretrainedPage:
    """Make the page on pretrained weights from their cards."""

    out: Path = Path("docs/pretrained.md")
    """The page."""
    weights: Path | None = None
    """Folder of exported weights; by default the weights in the package."""

    def run(self) -> None:
        """Write the page."""
        from retreever.lab.pretrained.page import write_page

        print(f"written: {write_page(self.weights, self.out)}")


Pretrained = group(
    "List the weights in the package, or export weights from runs.",
    one_of({"list": PretrainedList, "export": PretrainedExport, "page": PretrainedPage}),
)
