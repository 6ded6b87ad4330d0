"""The command `retreever data`. Light on purpose: torch is loaded only where files are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg
from tyro.conf import subcommand as named

from retreever.arguments import reject
from retreever.data.catalogue import DATASETS, Asked, Dataset, Name, data_root, files_of, name_of


@dataclass(frozen=True)
class DataOptions:
    """What all of them share."""

    root: Annotated[Path | None, arg(aliases=("--data",))] = None  # as train and eval call it
    """Folder the datasets lie in; by default RETREEVER_DATA, else ~/.local/share/retreever."""


@dataclass(frozen=True)
class DataList(DataOptions):
    """Every dataset: what it is for, its files, where they are looked for, what is there, and the terms."""

    def run(self) -> None:
        """Print the list."""
        for dataset in DATASETS.values():
            print("\n".join(described(dataset, data_root(self.root) / dataset.name)), end="\n\n")


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
    """Get the official files, going on where an earlier try ended, and check them."""

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


@dataclass(frozen=True)
class Data:
    """The datasets: what there is, whether it is whole, and how to get it."""

    what: (
        Annotated[DataList, named("list", prefix_name=False)]
        | Annotated[DataCheck, named("check", prefix_name=False)]
        | Annotated[DataFetch, named("fetch", prefix_name=False)]
    )

    def run(self) -> int | None:
        """Run the command asked for."""
        return self.what.run()


def described(dataset: Dataset, folder: Path) -> list[str]:
    """Some lines on one dataset."""
    found = files_of(dataset, folder)
    lines = [f"{dataset.name}: {dataset.title}"]
    for name, path in found.items():
        lines.append(f"  {name if path is None else path.name}: {'absent' if path is None else size_of(path)}")
    state = "all present" if all(found.values()) else dataset.advice
    return [*lines, f"  looked for in {folder}: {state}", f"  terms: {dataset.terms}", f"  see {dataset.page}"]


def size_of(path: Path) -> str:
    """In bytes; of a folder, how many files."""
    if path.is_dir():
        return f"{sum(1 for _ in path.iterdir()):,} files"
    return f"{path.stat().st_size:,} bytes"


def report(name: Name, root: Path | None) -> int:
    """Print what a check found; 1 when something is wrong."""
    from retreever.lab.data_check import check

    found = check(name, root)
    for line in found.lines:
        print(f"{name}: {line}")
    print(f"{name}: {'FAULT: ' + found.fault if found.fault else 'good'}", flush=True)
    return int(bool(found.fault))
