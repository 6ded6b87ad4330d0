"""The command `retreever data`. torch is imported only to read files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from retreever.arguments import reject
from retreever.data.catalogue import DATASETS, Asked, Dataset, Name, data_root, files_of, name_of
from retreever.errors import one_line
from retreever.lab.commands import group, one_of


@dataclass(frozen=True)
class DataOptions:
    """Options of all data commands."""

    root: Annotated[Path | None, arg(aliases=("--data",))] = None  # as train and eval call it
    """Folder of the datasets; by default RETREEVER_DATA, else ~/.local/share/retreever."""


@dataclass(frozen=True)
class DataList(DataOptions):
    """List every dataset: its use, its files, their folder, which are present, and the terms."""

    def run(self) -> None:
        """Print the list."""
        for dataset in DATASETS.values():
            lines = described(dataset, data_root(self.root) / dataset.name)
            print("\n".join(map(one_line, lines)), end="\n\n")


@dataclass(frozen=True)
class DataCheck(DataOptions):
    """Read every file to the end: present, whole, checksums and counts; 1 when something is missing or broken."""

    names: Positional[tuple[Asked, ...]] = ()
    """Which datasets; all by default."""

    def run(self) -> int:
        """Check the files and print what was found."""
        return max(report(name_of(name), self.root) for name in self.names or tuple(DATASETS))


@dataclass(frozen=True)
class DataFetch(DataOptions):
    """Download the official files, resuming partial downloads, and check them."""

    names: Positional[tuple[Asked, ...]] = ()
    """Which datasets."""

    def run(self) -> int:
        """Fetch and check the files."""
        from retreever.data.fetch import fetch

        if not self.names:
            reject("names", f"one or more of {', '.join(DATASETS)}", "none")
        for name in self.names:
            fetch(name_of(name), self.root)
        return max(report(name_of(name), self.root) for name in self.names)


Data = group(
    "List, check and download the datasets.", one_of({"list": DataList, "check": DataCheck, "fetch": DataFetch})
)


def described(dataset: Dataset, folder: Path) -> list[str]:
    """Lines of text on one dataset: title, files, folder and terms."""
    found = files_of(dataset, folder)
    lines = [f"{dataset.name}: {dataset.title}"]
    for name, path in found.items():
        lines.append(f"  {name if path is None else path.name}: {'absent' if path is None else size_of(path)}")
    state = "all present" if all(found.values()) else dataset.advice
    return [*lines, f"  looked for in {folder}: {state}", f"  terms: {dataset.terms}", f"  see {dataset.page}"]


def size_of(path: Path) -> str:
    """Size of a file in bytes, or the number of files in a folder, as text."""
    if path.is_dir():
        return f"{sum(1 for _ in path.iterdir()):,} files"
    return f"{path.stat().st_size:,} bytes"


def report(name: Name, root: Path | None) -> int:
    """Check a dataset and print the result; returns 1 for a fault, else 0."""
    from retreever.lab.data_check import check

    found = check(name, root)
    for line in found.lines:
        print(f"{name}: {one_line(line)}")
    print(f"{name}: {'FAULT: ' + one_line(found.fault) if found.fault else 'good'}", flush=True)
    return int(bool(found.fault))
