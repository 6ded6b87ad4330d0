"""Datasets: where they are looked for, and what is said of one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from retreever.data.catalogue import DATASETS, data_root, files_of, find_data, name_of
from retreever.errors import DataError, InputError


def test_the_root_is_an_option_a_variable_or_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETREEVER_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_root() == tmp_path and data_root("there") == Path("there")
    assert data_root("~/mine") == Path("/home/someone/mine")
    monkeypatch.delenv("RETREEVER_DATA")
    assert data_root() == Path("/home/someone/.local/share/retreever")


def test_a_dataset_is_found_by_root_by_folder_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "person_activity"
    folder.mkdir()
    (folder / "mine.txt").touch()
    assert find_data("person_activity", tmp_path) == folder
    assert find_data("person_activity", folder) == folder
    assert find_data("person_activity", str(folder / "mine.txt")) == folder / "mine.txt"
    monkeypatch.setenv("RETREEVER_DATA", str(tmp_path))
    assert find_data("person_activity") == folder


def test_an_absent_dataset_says_where_it_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^emnist: expected {tmp_path}/x/emnist or {tmp_path}/x, .*data fetch emnist"):
        find_data("emnist", tmp_path / "x")
    with pytest.raises(
        DataError, match=r"^celeba: expected .*/celeba, .*img_align_celeba.zip .*by hand from .*https://"
    ):
        find_data("celeba")
    with pytest.raises(InputError, match=r"^name: expected one of emnist, celeba, person_activity, got 'mnist'"):
        find_data("mnist")  # type: ignore[arg-type]


def test_files_are_found_plain_gzipped_and_unpacked(tmp_path: Path) -> None:
    (tmp_path / "img_align_celeba").mkdir()
    found = files_of(DATASETS["celeba"], tmp_path)
    assert list(found.values()) == [tmp_path / "img_align_celeba", None]
    (tmp_path / "Eval").mkdir()
    (tmp_path / "Eval/list_eval_partition.txt").touch()
    assert all(files_of(DATASETS["celeba"], tmp_path).values())
    (tmp_path / "ConfLongDemo_JSI.txt.gz").touch()
    assert list(files_of(DATASETS["person_activity"], tmp_path).values()) == [tmp_path / "ConfLongDemo_JSI.txt.gz"]


def test_a_dataset_also_goes_by_the_name_of_its_task() -> None:
    assert name_of("activity") == "person_activity" and [name_of(name) for name in DATASETS] == list(DATASETS)


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=list(DATASETS))
def test_every_dataset_is_described(dataset: object) -> None:
    assert dataset is DATASETS[dataset.name] and dataset.terms and dataset.page.startswith("https://")  # type: ignore[attr-defined]
