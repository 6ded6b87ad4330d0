"""CelebA: official parts, pixels as Pillow squashes them, one decoding, and what a bad file says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from retreever import TransformerCA
from retreever.data import celeba_files
from retreever.data.celeba_files import read_partition
from retreever.errors import BackendError, DataError, InputError
from retreever.tasks.celeba import CelebATask
from retreever.train.engine import Task

REAL = Path(__file__).parents[3] / "shared/data/celeba"
PARTS = [0, 0, 1, 2, 0, 1, 2, 0, 0, 0, 2, 0]
NAMES = [f"{number:06}.jpg" for number in range(1, len(PARTS) + 1)]
Made = Callable[..., Path]


def jpeg(number: int, mode: str = "RGB") -> bytes:
    """Made-up, 44 x 54: brighter to the right and, in blue, downwards; red says which."""
    rows, columns = np.mgrid[:54, :44]
    pixels = np.stack([np.full_like(rows, 20 * number), 5 * columns, 4 * rows], axis=-1).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(data, "JPEG", quality=95)
    return data.getvalue()


JPEGS = {name: jpeg(number) for number, name in enumerate(NAMES, start=1)}
LINES = [f"{name} {part}" for name, part in zip(NAMES, PARTS, strict=True)]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Writes the official files, as a zip or a folder, and returns their folder."""

    def make(images: dict[str, bytes] = JPEGS, lines: list[str] = LINES, zipped: bool = True) -> Path:
        folder = tmp_path / "celeba"
        folder.mkdir(exist_ok=True)
        (folder / "list_eval_partition.txt").write_text("".join(f"{line}\n" for line in lines))
        if zipped:
            with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as target:
                for name, data in images.items():
                    target.writestr(f"img_align_celeba/{name}", data)
        else:
            (folder / "img_align_celeba").mkdir()
            for name, data in images.items():
                (folder / "img_align_celeba" / name).write_bytes(data)
        return folder

    return make


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def squashed(number: int, size: int) -> np.ndarray:
    """The plain way: decode whole, resize."""
    image = Image.open(io.BytesIO(jpeg(number)))
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("size", [16, 32, 48])
def test_parts_and_pixels_are_the_official_ones(made: Made, cache: Path, zipped: bool, size: int) -> None:
    task = CelebATask(made(zipped=zipped), size, cache)
    (trained, kept), tested = task.split, task.test_images
    for part, images in enumerate((trained, kept, tested)):
        numbers = [number for number, owner in enumerate(PARTS, start=1) if owner == part]
        assert images.dtype == torch.uint8 and images.shape == (len(numbers), size, size, 3)
        assert np.array_equal(images.numpy(), np.stack([squashed(number, size) for number in numbers]))


def test_images_stand_upright(made: Made, cache: Path) -> None:
    image = CelebATask(made(), 32, cache).images[0].float()
    assert bool((image[:, -1, 1] > image[:, 0, 1]).all()) and bool((image[-1, :, 2] > image[0, :, 2]).all())


def test_validation_is_held_out_unless_asked_to_train_as_the_paper_does(made: Made, cache: Path) -> None:
    folder = made()
    honest, paper = CelebATask(folder, cache=cache), CelebATask(folder, cache=cache, train_on="train+validation")
    assert [len(part) for part in honest.split] == [7, 2] and [len(part) for part in paper.split] == [9, 2]
    assert torch.equal(honest.split[1], paper.split[1]) and torch.equal(honest.test_images, paper.test_images)
    assert torch.equal(paper.split[0], honest.training_images) and len(honest.split[1]) == 2
    red = [set(images[:, 0, 0, 0].tolist()) for images in (*honest.split, honest.test_images)]
    assert len(set.union(*red)) == sum(map(len, red)) == len(PARTS)


def test_batches_follow_the_pixel_protocol_and_repeat_exactly(made: Made, cache: Path) -> None:
    task = CelebATask(made(), cache=cache)
    assert isinstance(task, Task)
    batch = task.sample(5, task.training(0)).validate()
    assert batch.xc.shape[0] == 5 and batch.xc.shape[2] == 2 and batch.yt.shape[2] == 3
    again = CelebATask(task.path, cache=cache)
    for first, second in zip((*task.test(), *task.validation()), (*again.test(), *again.validation()), strict=True):
        assert torch.equal(first.xt, second.xt) and torch.equal(first.yt, second.yt)
    fixed = [next(task.validation()), next(task.test()), *(task.sample(2, task.training(seed)) for seed in range(20))]
    assert len({tuple(batch.xc[0, :3].flatten().tolist()) for batch in fixed}) == len(fixed)
    model = TransformerCA(dim_x=2, dim_y=3, dim=16, heads=2, layers=1, hidden=16)
    assert model.predict(batch.xc, batch.yc, batch.xt).mean.shape == batch.yt.shape


def test_images_are_decoded_once(made: Made, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second task reads the cache; changed files are decoded again."""
    folder = made()
    first = CelebATask(folder, cache=cache).images
    with monkeypatch.context() as patch:
        patch.setattr(celeba_files, "_pixels", None)
        assert torch.equal(CelebATask(folder, cache=cache).images, first)
    made({**JPEGS, NAMES[0]: jpeg(9)})
    os.utime(folder / "img_align_celeba.zip", ns=(1, 1))
    assert not torch.equal(CelebATask(folder, cache=cache).images[0], first[0])


def test_what_a_user_changes_stays_in_memory(made: Made, cache: Path) -> None:
    folder = made()
    task = CelebATask(folder, cache=cache)
    before = task.images.clone()
    task.images.zero_()
    assert torch.equal(CelebATask(folder, cache=cache).images, before)


def test_a_damaged_cache_is_made_again(made: Made, cache: Path) -> None:
    folder = made()
    before = CelebATask(folder, cache=cache).images.clone()
    (file,) = cache.glob("celeba-32-*.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert torch.equal(CelebATask(folder, cache=cache).images, before)
    file.write_bytes(file.read_bytes()[:2_000])
    assert torch.equal(CelebATask(folder, cache=cache).images, before)


def test_without_a_place_for_the_cache_images_are_decoded_in_memory(made: Made, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert np.array_equal(CelebATask(made(), cache=blocked).images[0].numpy(), squashed(1, 32))


def test_grey_images_get_three_channels_and_unlisted_ones_are_left_out(made: Made, cache: Path) -> None:
    folder = made({**JPEGS, NAMES[0]: jpeg(1, "L"), "999999.jpg": b"never read"})
    assert len(set(CelebATask(folder, cache=cache).images[0, 5, 5].tolist())) == 1


def test_the_official_folders_are_found(made: Made, cache: Path) -> None:
    folder = made()
    for name, sub in {"img_align_celeba.zip": "Img", "list_eval_partition.txt": "Eval"}.items():
        (folder / sub).mkdir()
        (folder / name).rename(folder / sub / name)
    assert len(CelebATask(folder, cache=cache).images) == len(PARTS)


def big() -> bytes:
    data = io.BytesIO()
    Image.new("L", (4_200, 4_000)).save(data, "JPEG")
    return data.getvalue()


def odd_metadata() -> bytes:
    """Pillow warns about it, which the tests make an error."""
    data = io.BytesIO()
    Image.new("L", (44, 54)).save(data, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    return data.getvalue()


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (odd_metadata(), "damaged JPEG: Corrupt EXIF data"),
        (JPEGS[NAMES[2]][:-200], "damaged JPEG: "),
        (b"", "expected a JPEG image"),
        (b"\x89PNG\r\n\x1a\nno", "expected a JPEG image"),
        (big(), "expected at most 1,048,576 pixels, got 4200 x 4000"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_bad_images_are_named_and_nothing_is_kept(
    made: Made, cache: Path, image: bytes, problem: str, zipped: bool
) -> None:
    folder = made({**JPEGS, NAMES[2]: image}, zipped=zipped)
    where = r"img_align_celeba.zip, entry 'img_align_celeba/000003.jpg'" if zipped else "img_align_celeba/000003.jpg"
    with pytest.raises(DataError, match=f"{where}: {problem}") as error:
        _ = CelebATask(folder, cache=cache).images
    assert "\n" not in str(error.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_flipped_bit_in_the_zip_is_noticed(made: Made, cache: Path) -> None:
    file = made() / "img_align_celeba.zip"
    with zipfile.ZipFile(file) as source:
        place = source.getinfo("img_align_celeba/000005.jpg").header_offset + 200
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"entry 'img_align_celeba/000005.jpg': damaged: Bad CRC-32"):
        _ = CelebATask(file.parent, cache=cache).images


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../../x.jpg", r"entry 'img_align_celeba/../../x.jpg': refused, it leads out"),
        ("again/000001.jpg", r"entry .*again/000001.jpg': expected 000001.jpg once"),
    ],
)
def test_harmful_zips_are_refused(made: Made, cache: Path, name: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        _ = CelebATask(made({**JPEGS, name: b""}), cache=cache).images


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("000003.jpg", r"line 3: expected an image and its part, as in '000001.jpg 0', got '000003.jpg'"),
        ("000003.jpg 3", "line 3: expected an image and its part"),
        ("000003.jpg one", "line 3: expected an image and its part"),
        ("../000003.jpg 1", "line 3: expected an image and its part"),
        ("", "line 3: expected an image and its part"),
        ("000001.jpg 1", "line 3: expected every image once, got 000001.jpg again"),
        ("000099.jpg 1", r"names 000099.jpg, which .*img_align_celeba.* does not have"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_bad_partitions_are_named(made: Made, cache: Path, line: str, problem: str, zipped: bool) -> None:
    folder = made(lines=[*LINES[:2], line, *LINES[3:]], zipped=zipped)
    with pytest.raises(DataError, match=problem) as error:
        _ = CelebATask(folder, cache=cache).images
    assert "list_eval_partition.txt" in str(error.value)


def test_how_many_images_are_absent_is_said(made: Made, cache: Path) -> None:
    folder = made({name: data for name, data in JPEGS.items() if name > "000004.jpg"})
    with pytest.raises(
        DataError, match=r"list_eval_partition.txt: names 000001.jpg and 3 more, which .*\.zip does not"
    ):
        _ = CelebATask(folder, cache=cache).images


def test_every_part_must_have_images(made: Made) -> None:
    with pytest.raises(DataError, match=r"expected images in all three parts, got \[1, 1, 0\]"):
        read_partition(made(lines=["1.jpg 0", "2.jpg 1"]) / "list_eval_partition.txt")


def test_absent_files_are_named(made: Made) -> None:
    folder = made()
    (folder / "img_align_celeba.zip").unlink()
    with pytest.raises(DataError, match=r"celeba: expected img_align_celeba.zip or img_align_celeba or Img/"):
        _ = CelebATask(folder).images
    (folder / "list_eval_partition.txt").unlink()
    (folder / "img_align_celeba").mkdir()
    with pytest.raises(DataError, match=r"celeba: expected list_eval_partition.txt or Eval/"):
        _ = CelebATask(folder).partition


@pytest.mark.parametrize("wrong", [{"size": 1}, {"size": "32"}, {"train_on": "test"}])
def test_impossible_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(wrong))}: expected "):
        CelebATask("somewhere", **wrong)  # type: ignore[arg-type]


def test_without_pillow_one_line_says_what_to_install(made: Made, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.delattr("PIL.Image")
    with pytest.raises(BackendError, match=r'pip install "retreever\[data\]"'):
        _ = CelebATask(made(), cache=cache).images


def test_pillow_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, retreever.tasks.celeba; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not REAL.is_dir(), reason="the CelebA files are not here")
def test_the_real_partition_has_the_known_counts() -> None:
    names, ends = read_partition(REAL / "list_eval_partition.txt")
    assert ends == (32_611, 32_611 + 2_945, 32_611 + 2_945 + 2_903) and len(names) == 38_459
    with celeba_files.reader(celeba_files.find_celeba(REAL), names) as read:
        assert len(read(names[-1])[1]) > 1_000
