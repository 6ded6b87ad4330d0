"""The datasets: what each is for, its files, its terms, where it comes from and where it is looked for. Free of torch.

Nothing here is shipped: users bring the official files, or `retreever data fetch` gets them. A dataset lies in a folder
of its name under the data root: an option, else the environment variable RETREEVER_DATA, else ~/.local/share/retreever.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retreever.arguments import check_choice
from retreever.errors import DataError

Name = Literal["emnist", "celeba", "person_activity"]
Asked = Literal["emnist", "celeba", "person_activity", "activity"]  # the last is the task person_activity serves
DATA_VARIABLE, CACHE_VARIABLE = "RETREEVER_DATA", "RETREEVER_CACHE"


@dataclass(frozen=True)
class Dataset:
    """One dataset."""

    name: Name  # of its folder
    title: str  # in words, with the task it serves
    files: tuple[str, ...]  # official names, plain or with .gz; of alternatives joined by " or " one is enough
    terms: str  # under which its makers give it away
    page: str  # where its makers describe it
    address: str = ""  # of the official archive; empty where none can be fetched without a person
    archive_md5: str = ""
    md5: tuple[tuple[str, str], ...] = ()  # of the official files, unpacked, where known

    @property
    def advice(self) -> str:
        """How to get it."""
        if self.address:
            return f"`retreever data fetch {self.name}` gets it"
        return f"get {' and '.join(self.files)} by hand from the drive linked at {self.page}"


DATASETS: dict[Name, Dataset] = {
    "emnist": Dataset(
        "emnist",
        "EMNIST 'balanced': handwritten digits and letters, 28 x 28 (image completion)",
        tuple(
            f"emnist-balanced-{p}-{kind}-ubyte" for p in ("train", "test") for kind in ("images-idx3", "labels-idx1")
        ),
        "derived from NIST Special Database 19, free of charge; please cite Cohen et al., 2017",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
    ),
    "celeba": Dataset(
        "celeba",
        "CelebA: aligned faces (image completion)",
        ("img_align_celeba.zip or img_align_celeba", "list_eval_partition.txt"),
        "non-commercial research only, no redistribution; its makers' agreement applies",
        "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        md5=(
            ("img_align_celeba.zip", "00d2c5bc6d35e252742224ab0c1e8fcb"),
            ("list_eval_partition.txt", "d32c9cbf5e040fd4025c592c306e6668"),
        ),
    ),
    "person_activity": Dataset(
        "person_activity",
        "Localization Data for Person Activity (human activity)",
        ("ConfLongDemo_JSI.txt",),
        "CC BY 4.0, UCI Machine Learning Repository",
        "https://archive.ics.uci.edu/dataset/196/localization+data+for+person+activity",
        "https://archive.ics.uci.edu/static/public/196/localization+data+for+person+activity.zip",
        md5=(("ConfLongDemo_JSI.txt", "280a677ae0d673ec9a50ada480d8a529"),),
    ),
}


def data_root(path: str | Path | None = None) -> Path:
    """Where datasets lie: `path`, else RETREEVER_DATA, else ~/.local/share/retreever."""
    return _root(path, DATA_VARIABLE, "~/.local/share/retreever")


def cache_root(path: str | Path | None = None) -> Path:
    """Where what was computed once is kept: `path`, else RETREEVER_CACHE, else ~/.cache/retreever."""
    return _root(path, CACHE_VARIABLE, "~/.cache/retreever")


def find_data(name: Name, path: str | Path | None = None) -> Path:
    """The folder of a dataset (or a file of it): `path` or what lies in it under that name, else under the data root.

    Raises `DataError` when it is not there. What lies in it is looked at when it is read.
    """
    check_choice("name", name, tuple(DATASETS))
    root = data_root(path)
    places = [root / name, *([root] if path is not None else [])]
    for place in places:
        if place.exists():
            return place
    looked = " or ".join(map(str, places))
    raise DataError(
        f"{name}: expected {looked}, found nothing there ({DATASETS[name].advice}; see `retreever data list`)"
    )


def name_of(asked: Asked) -> Name:
    """The dataset's own name."""
    return "person_activity" if asked == "activity" else asked


def files_of(dataset: Dataset, folder: Path) -> dict[str, Path | None]:
    """Each of the dataset's files and where it is in `folder`, None where absent."""
    found: dict[str, Path | None] = {}
    for file in dataset.files:
        places = [place for name in file.split(" or ") for place in places_of(folder, name)]
        found[file] = next((place for place in places if place.exists()), None)
    return found


def places_of(folder: Path, name: str) -> list[Path]:
    """Where a file may lie, plain or gzipped; CelebA's makers have theirs in the folders Img and Eval."""
    return [folder / sub / ending for sub in ("", "Img", "Eval") for ending in (name, f"{name}.gz")]


def _root(path: str | Path | None, variable: str, default: str) -> Path:
    return Path(path or os.environ.get(variable) or default).expanduser()
