"""Image completion: the pixel protocol, EMNIST as the files hold it, and sets that stay apart and repeat exactly."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from retreever import RetreeverError, TransformerCA
from retreever.batch import Batch
from retreever.errors import DataError, InputError
from retreever.tasks.images import EmnistTask, complete, load_emnist
from retreever.tasks.padding import Law
from retreever.train.config import TrainConfig
from retreever.train.engine import Trainer
from retreever.train.fitting import fit
from retreever.train.protocols import Task
from retreever.train.score import evaluate

REAL = Path(__file__).parents[3] / "shared/data/emnist"
SIDE = 28
COUNT = {"train": 60, "test": 40}


def write_emnist(folder: Path, part: str, images: Tensor, labels: Sequence[int]) -> None:
    """Upright images as the official files hold them: transposed; training files gzipped, test files plain."""
    files = {
        "images-idx3": struct.pack(">4I", 0x803, *images.shape) + images.mT.contiguous().numpy().tobytes(),
        "labels-idx1": struct.pack(">2I", 0x801, len(labels)) + bytes(labels),
    }
    for kind, data in files.items():
        name = f"emnist-balanced-{part}-{kind}-ubyte"
        if part == "train":
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)


def glyph(label: int, index: int) -> Tensor:
    """An L, upright and asymmetric: its class in the top left corner, its number in the top right one."""
    image = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    image[4:24, 6:9], image[21:24, 6:20] = 250, 250
    image[0, 0], image[0, -1] = label, index
    return image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training images of 20 classes, 40 for test; every image is different."""
    path = tmp_path_factory.mktemp("emnist")
    for part, count in COUNT.items():
        labels = [index % 20 for index in range(count)]
        images = torch.stack([glyph(label, index + 100 * (part == "test")) for index, label in enumerate(labels)])
        write_emnist(path, part, images, labels)
    return path


@pytest.fixture
def task(folder: Path) -> EmnistTask:
    return EmnistTask(folder, validation_images=10)


def numbers(images: Tensor) -> list[int]:
    return images[:, 0, -1, 0].tolist()


def pixel_indices(x: Tensor) -> Tensor:
    row, column = ((x + 1) * (SIDE - 1) / 2).round().long().unbind(-1)
    return row * SIDE + column


def coloured(count: int) -> Tensor:
    """Images (count, 28, 28, 3) in which every pixel says which image, row and column it is."""
    image, row, column = torch.meshgrid(torch.arange(count), torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return torch.stack([image, row, column], dim=-1).to(torch.uint8)


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("xc", "yc", "xt", "yt"))


def test_characters_stand_upright(folder: Path) -> None:
    images = load_emnist(folder, "train", "seen")
    assert torch.equal(images[3, ..., 0], glyph(3, 3)) and not torch.equal(images[3, ..., 0], glyph(3, 3).T)


def test_digits_are_seen_in_training_and_other_classes_only_in_the_unseen_test(folder: Path, task: EmnistTask) -> None:
    unseen = EmnistTask(folder, "unseen", validation_images=10)
    assert task.training_images.shape == (30, SIDE, SIDE, 1) and torch.equal(*(t.split[0] for t in (task, unseen)))
    for images in (task.training_images, task.test_images):
        assert set(images[:, 0, 0, 0].tolist()) == set(range(10))
    assert set(unseen.test_images[:, 0, 0, 0].tolist()) == set(range(10, 20))


def test_numbers_of_pixels_follow_the_protocol() -> None:
    """3 to 196 in the context, 3 to 199 less that many to predict."""
    generator = torch.Generator().manual_seed(0)
    images = coloured(1)
    batches = [complete(images, generator) for _ in range(3_000)]
    sizes = [(batch.xc.shape[1], batch.xt.shape[1]) for batch in batches]
    assert min(n for n, _ in sizes) == 3 and max(n for n, _ in sizes) == 196
    assert all(3 <= m <= 199 - n for n, m in sizes)
    assert {m for n, m in sizes if n == 195} == {3, 4}
    assert abs(sum(n for n, _ in sizes) / len(sizes) - 99.5) < 4 * 56 / len(sizes) ** 0.5


def test_places_and_values_are_those_of_the_pixels() -> None:
    """By hand: place 2i/27 - 1, value pixel/255 - 0.5 in every channel; from the row's own image."""
    for seed in range(5):
        batch = complete(coloured(4), torch.Generator().manual_seed(seed)).validate()
        x, y = torch.cat([batch.xc, batch.xt], 1), torch.cat([batch.yc, batch.yt], 1)
        image, row, column = ((y + 0.5) * 255).round().unbind(-1)
        assert torch.equal(image, torch.arange(4.0)[:, None].expand_as(image))
        assert torch.allclose(x, torch.stack([2 * row / 27 - 1, 2 * column / 27 - 1], -1), atol=1e-6)
        assert x.dtype == y.dtype == torch.float32


def test_the_corners_of_the_range_are_reached() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).repeat(16, SIDE, SIDE // 2)[..., None]
    batch = complete(images, torch.Generator().manual_seed(1))
    assert set(batch.yc.flatten().tolist()) == {-0.5, 0.5}
    assert (float(batch.xc.min()), float(batch.xc.max())) == (-1.0, 1.0)


def test_no_pixel_comes_twice_and_every_image_has_its_own() -> None:
    batch = complete(coloured(8), torch.Generator().manual_seed(2))
    drawn = pixel_indices(torch.cat([batch.xc, batch.xt], 1))
    assert all(len(set(row.tolist())) == drawn.shape[1] for row in drawn)
    assert len({frozenset(row.tolist()) for row in drawn}) == 8


def test_every_pixel_is_drawn_equally_often() -> None:
    """Chi-squared over 784 pixels, in standard deviations of its distribution."""
    generator, images = torch.Generator().manual_seed(3), coloured(100)
    drawn = torch.cat([pixel_indices(complete(images, generator).xc).flatten() for _ in range(20)])
    expected = len(drawn) / SIDE**2
    chi = float(((drawn.bincount(minlength=SIDE**2) - expected) ** 2 / expected).sum())
    assert abs(chi - 783) < 5 * (2 * 783) ** 0.5


def test_images_too_small_for_the_protocol_are_refused() -> None:
    with pytest.raises(InputError, match=r"^images: expected at least 199 pixels .*, got 14 x 14"):
        complete(torch.zeros(1, 14, 14, 1, dtype=torch.uint8), torch.Generator())


def test_metric_sums_over_channels() -> None:
    batch = complete(coloured(2), torch.Generator().manual_seed(4))
    normal = Normal(torch.zeros_like(batch.yt), torch.ones_like(batch.yt))
    value = EmnistTask.metric(Independent(normal, 1), batch)
    assert value.shape == batch.xt.shape[:2]
    assert torch.allclose(value, normal.log_prob(batch.yt).sum(-1))


def test_validation_images_are_never_trained_on(folder: Path, task: EmnistTask) -> None:
    trained, kept = map(numbers, task.split)
    assert len(kept) == 10 and sorted(trained + kept) == numbers(task.training_images)
    assert numbers(EmnistTask(folder, validation_images=10).split[1]) == kept
    generator = task.training(0)
    most = [task.sample(100, generator) for _ in range(20)]
    corners = [torch.cat([b.yc, b.yt], 1)[pixel_indices(torch.cat([b.xc, b.xt], 1)) == SIDE - 1] for b in most]
    assert {round(255 * (float(v) + 0.5)) for v in torch.cat(corners)} == set(trained)


def test_the_test_set_takes_images_in_order_and_repeats_exactly(folder: Path, task: EmnistTask) -> None:
    batches = list(task.test())
    assert len(batches) == task.test_batches
    assert [len(batch.xc) for batch in batches] == [16, 4]
    start = 0
    for batch in batches:
        pixels, images = pixel_indices(batch.xt), task.test_images[start : start + len(batch.xt)]
        assert torch.equal(batch.yt, images.flatten(1, 2).gather(1, pixels[..., None]) / 255 - 0.5)
        start += len(images)
    task.sample(4, task.training(0))
    for again in (task, EmnistTask(folder, validation_images=20)):
        assert all(same(a, b) for a, b in zip(batches, again.test(), strict=True))
    assert all(same(a, b) for a, b in zip(task.validation(), task.validation(), strict=True))


def test_seeds_never_coincide_and_the_same_seed_repeats(task: EmnistTask) -> None:
    fixed = [next(task.validation()), next(task.test())]
    trained = [task.sample(16, task.training(seed)) for seed in range(20)]
    drawn = {tuple(pixel_indices(batch.xc[:1, :3]).flatten().tolist()) for batch in (*fixed, *trained)}
    assert len(drawn) == 22
    assert same(trained[3], task.sample(16, task.training(3)))


def test_files_are_read_once_and_only_when_needed(tmp_path: Path) -> None:
    """What was read stays in memory: the files may go."""
    write_emnist(tmp_path, "train", torch.stack([glyph(1, i) for i in range(5)]), [1] * 5)
    task = EmnistTask(tmp_path, validation_images=2)
    first = task.sample(3, task.training(0))
    for file in tmp_path.iterdir():
        file.unlink()
    assert same(task.sample(3, task.training(0)), first)
    with pytest.raises(DataError, match=r"emnist-balanced-test-labels-idx1-ubyte: expected this file or .*\.gz"):
        task.test()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_the_same_batches_as_the_cpu(task: EmnistTask) -> None:
    here, there = (task.sample(16, task.training(0), device) for device in ("cpu", "cuda"))
    assert there.yt.is_cuda and torch.equal(pixel_indices(here.xt), pixel_indices(there.xt).cpu())
    assert torch.allclose(here.yt, there.yt.cpu(), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ["batch", "each"])
def test_a_gpu_trains_on_them_in_one_graph(folder: Path, sizes: Law) -> None:
    model = TransformerCA(dim_x=2, dim_y=1, head="bounded", dim=16, heads=2, layers=1, hidden=32)
    config = TrainConfig(steps=4, batch=4, warmup=1, evaluate_every=4)
    trainer = Trainer(model, EmnistTask(folder, validation_images=2, sizes=sizes), config, "cuda")
    trainer.advance()
    assert trainer.graphed and trainer.graphs and trainer.history


def test_training_improves_the_log_likelihood(task: EmnistTask) -> None:
    assert isinstance(task, Task)
    torch.manual_seed(0)
    model = TransformerCA(dim_x=2, dim_y=1, head="bounded", dim=16, heads=2, layers=1, hidden=32)
    before = evaluate(model, task, task.test())
    fit(model, task, TrainConfig(steps=60, batch=16, lr=3e-3, warmup=5, evaluate_every=60))
    assert evaluate(model, task, task.test()) > before + 0.5


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([1, 47], r"labels-idx1-ubyte\.gz: expected labels from 0 to 46, got 47"),
        ([10, 11], r"labels-idx1-ubyte\.gz: expected some labels of seen classes, got none"),
        ([1], r"labels-idx1-ubyte\.gz: expected 2 labels, one per image of .*images-idx3-ubyte\.gz, got 1"),
    ],
)
def test_files_that_are_not_emnist_are_refused(tmp_path: Path, labels: list[int], problem: str) -> None:
    write_emnist(tmp_path, "train", torch.stack([glyph(0, 0)] * 2), labels)
    with pytest.raises(DataError, match=problem):
        EmnistTask(tmp_path).sample(1, torch.Generator())


@pytest.mark.parametrize("wrong", [{"classes": "letters"}, {"validation_images": 0}, {"validation_images": 30}])
def test_impossible_settings_are_refused_by_name(folder: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(wrong))}: expected "):
        EmnistTask(folder, **wrong).validation()  # type: ignore[arg-type]


@pytest.mark.skipif(not REAL.is_dir(), reason="the EMNIST files are not here")
def test_the_real_files_have_the_known_numbers_of_images() -> None:
    task, unseen = EmnistTask(REAL), EmnistTask(REAL, "unseen")
    assert task.training_images.shape == (24_000, SIDE, SIDE, 1)
    assert task.test_images.shape == (4_000, SIDE, SIDE, 1)
    assert unseen.test_images.shape == (14_800, SIDE, SIDE, 1)
    assert sum(len(batch.xc) for batch in task.test()) == 4_000


@pytest.mark.gpu
def test_images_that_do_not_fit_on_a_gpu_stay_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 1_000))
    task = EmnistTask(folder, validation_images=2)
    batch = task.sample(3, task.training(0), "cuda")
    assert batch.xc.is_cuda and not task._trained_on(torch.device("cuda")).is_cuda
    sizes = task.draw_sizes(task.training(0))
    with pytest.raises(RetreeverError, match="do not fit on cuda"):
        task.sample_padded(3, torch.Generator("cuda"), torch.tensor(sizes[:2], device="cuda"), sizes.room)
