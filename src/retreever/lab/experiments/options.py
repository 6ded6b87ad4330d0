"""Command line arguments of `retreever table`, `figure`, `experiment`, `collect`, `results`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional, Suppress

from retreever.lab.recipes.options import Where

FOLDER = Path("experiments")


@dataclass(frozen=True)
class Table:
    """Print a table of the paper with our results; without a name, list the tables."""

    name: Positional[str] = ""
    """Name of the table."""
    json: bool = False
    """Rows as JSON, for programs."""
    experiments: Path = FOLDER
    """Folder of recipe files and results."""

    def run(self) -> None:
        """Print the table, or the list of tables."""
        from retreever.lab.experiments.command import print_table

        print_table(self.name, self.json, self.experiments)


@dataclass(frozen=True)
class Figure:
    """Draw the figure of a table: scores against tokens, or learning curves."""

    name: Positional[str] = ""
    """Name of the table; without it, tables are listed."""
    out: Path | None = None
    """PNG file; by default docs/images/results-NAME.png, which the results page shows."""
    time: bool = False
    """Scores against the time of a prediction, to results-NAME-time.png."""
    experiments: Path = FOLDER
    """Folder of recipe files and results."""

    def run(self) -> None:
        """Draw the figure, or print the list of tables."""
        from retreever.lab.experiments.command import draw

        draw(self.name, self.out, self.experiments, self.time)


@dataclass(frozen=True)
class Collecting:
    """Options of commands that collect results from run folders."""

    data_note: dict[str, str] = field(default_factory=dict)
    """What the data files of a task were: --data-note emnist "EMNIST (re-drawn split)"."""
    replace: bool = False
    """Replace collected results of the same name with other scores."""
    experiments: Path = FOLDER
    """Folder of recipe files and results."""


@dataclass(frozen=True)
class Experiment(Collecting, Where):
    """Train the missing runs of a table, resume those that were stopped, collect them and print the table."""

    name: Positional[str] = ""
    """Name of the table; without it, tables are listed."""
    only: tuple[str, ...] = ()
    """Systems, by their keys in the recipe file; none means all."""
    columns: tuple[str, ...] = ()
    """Columns, by their keys in the recipe file; none means all."""
    seeds: tuple[int, ...] = ()
    """Seeds among those of the recipe file; none means all."""
    resume: Suppress[bool] = True

    def run(self) -> None:
        """Train, collect and print the table, or print the list of tables."""
        from retreever.lab.experiments.command import run_experiment

        run_experiment(self)


@dataclass(frozen=True)
class Collect(Collecting):
    """Collect the finished runs that some table needs into experiments/results."""

    runs: Positional[Path] = Path("runs")
    """Folder of run folders."""

    def run(self) -> None:
        """Collect the runs and print how many there were."""
        from retreever.lab.experiments.command import collect_runs

        collect_runs(self)


@dataclass(frozen=True)
class Results:
    """Make the results page from the collected results."""

    out: Path = Path("docs/results.md")
    """The page."""
    experiments: Path = FOLDER
    """Folder of recipe files and results."""

    def run(self) -> None:
        """Write the page."""
        from retreever.lab.experiments.results_page import write_results_page

        print(f"written: {write_results_page(self.experiments, self.out)}")
