"""`retreever data`: what it lists, what it finds wrong, and that its help is quick."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from PIL import Image
from tyro.conf import OmitArgPrefixes

from retreever.data.activity_file import TAGS
from retreever.data.catalogue import Name
from retreever.errors import DataError, InputError
from retreever.lab.data import Data
from retreever.lab.data_check import check

REAL = Path(__file__).parents[3] / "shared/data"
NAMES: tuple[Name, ...] = ("emnist", "celeba", "person_activity")


def data(*arguments: object) -> int:
    command: Any = tyro.cli(Data, args=[str(argument) for argument in arguments], config=(OmitArgPrefixes,))
    return command.run() or 0


def write_idx(file: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    file.write_bytes(header + values.numpy().tobytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """All three datasets, tiny, in their official formats."""
    for name in NAMES:
        (tmp_path / name).mkdir()
    for part in ("train", "test"):
        stem = tmp_path / "emnist" / f"emnist-balanced-{part}"
        write_idx(Path(f"{stem}-images-idx3-ubyte"), torch.zeros(47, 28, 28, dtype=torch.uint8))
        write_idx(Path(f"{stem}-labels-idx1-ubyte"), torch.arange(47, dtype=torch.uint8))
    picture = io.BytesIO()
    Image.new("RGB", (178, 218)).save(picture, "JPEG")
    with zipfile.ZipFile(tmp_path / "celeba/img_align_celeba.zip", "w") as target:
        for number in range(3):
            target.writestr(f"img_align_celeba/{number}.jpg", picture.getvalue())
    (tmp_path / "celeba/list_eval_partition.txt").write_text("0.jpg 0\n1.jpg 1\n2.jpg 2\n")
    rows = [f"A01,{TAGS[i % 4]},{i * 270_000},date,1,2,3,walking\n" for i in range(101)]
    (tmp_path / "person_activity/ConfLongDemo_JSI.txt").write_text("".join(rows))
    return tmp_path


def test_the_list_says_what_for_where_and_under_which_terms(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("list") == 0
    absent = capsys.readouterr().out
    assert data("list", "--data", root) == 0  # the option's name elsewhere
    shown = capsys.readouterr().out
    assert data("list", "--root", root) == 0
    present = capsys.readouterr().out
    for text in ("image completion", "human activity", "CC BY 4.0", "non-commercial research only", "https://"):
        assert text in absent and text in present
    assert absent.count("absent") == 7 and "`retreever data fetch emnist` gets it" in absent
    assert "absent" not in present and present.count("all present") == 3 and f"{root}/celeba" in present
    assert shown == present


def test_a_check_counts_and_says_what_differs_from_the_official(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("check", "--root", root) == 0
    out = capsys.readouterr().out
    for text in (
        "emnist: train: 47 images of 28 x 28, 47 classes, 10 digits and 37 others: differs from the official files",
        "celeba: 3 images in img_align_celeba.zip, 1 train, 1 validation, 1 test: differs from the official files",
        "celeba: img_align_celeba.zip: md5 differs from the official files",
        "person_activity: 101 rows, 1 recordings, 1 classes, 3 windows: differs from the official files",
        "person_activity: ConfLongDemo_JSI.txt: md5 differs from the official files",
    ):
        assert text in out
    assert out.count(": good") == 3


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "file", "problem"),
    [
        ("emnist", "emnist-balanced-test-images-idx3-ubyte", "expected 47 x 28 x 28"),
        ("celeba", "img_align_celeba.zip", "expected a zip archive"),
        ("celeba", "list_eval_partition.txt", "line"),
        ("person_activity", "ConfLongDemo_JSI.txt", "line 101: expected 8 columns"),
    ],
)
def test_broken_and_missing_files_are_faults(
    root: Path, name: Name, file: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate(root / name / file)
    assert data("check", name, "--root", root) == 1
    out = capsys.readouterr().out
    assert f"{name}: FAULT: " in out and problem in out and file in out
    (root / name / file).unlink()
    assert data("check", "--root", root) == 1
    assert capsys.readouterr().out.count("FAULT") == 1


def test_a_dataset_that_is_nowhere_is_a_fault_that_says_how_to_get_it() -> None:
    found = check("emnist")
    assert "retreever data fetch emnist" in found.fault and found.lines == ()


def test_fetch_wants_a_name_and_says_what_it_cannot_get(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^names: expected one or more of emnist, celeba, person_activity, got none"):
        data("fetch")
    with pytest.raises(DataError, match="by hand"):
        data("fetch", "celeba", "--root", tmp_path)


def test_fetch_leaves_what_is_there_and_checks_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("fetch", "celeba", "person_activity", "--root", root) == 0
    assert capsys.readouterr().out.count(": good") == 2


@pytest.mark.parametrize("command", ["check", "fetch"])
def test_the_task_names_its_dataset_too(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data(command, "activity", "--root", root) == 0
    assert "person_activity: good" in capsys.readouterr().out


def test_the_options_load_no_torch() -> None:
    code = "import sys, retreever.lab.data; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not REAL.is_dir(), reason="the data is not here")
def test_the_real_files_are_whole_and_said_to_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert data("check", "person_activity", "--root", REAL) == 0
    out = capsys.readouterr().out
    assert "164,860 rows, 25 recordings, 7 classes, 6,555 windows: as the official" in out and "md5 differs" in out


def test_paths_are_printed_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With control characters, and in bytes that are no UTF-8."""
    root = tmp_path / "a\x1b[2J\nb\udcff"
    (root / "emnist").mkdir(parents=True)
    assert data("list", "--root", root) == 0 and data("check", "emnist", "--root", root) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\udcff" not in out and out.count(r"/a\x1b[2J\nb\udcff/emnist") == 3
