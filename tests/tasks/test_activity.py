"""Human Activity: the official file, its time points, labels and windows, both splits, and what a bad file says."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from retreever import DataError, InputError, TransformerCA
from retreever.batch import Batch
from retreever.data.activity_file import CLASSES, FILE, LABELS, TAGS, Recording, read_rows, recordings_of
from retreever.tasks.activity import ActivityTask, Split, recording_indices, shuffled_indices, windows_of
from retreever.train import fit
from retreever.train.config import TrainConfig
from retreever.train.score import evaluate

WINDOW, STRIDE = 50, 25
START = 633_790_226_051_280_329
REAL = Path(__file__).parents[3] / "shared/data/person_activity" / f"{FILE}.gz"
GROUND = "standing up from sitting on the ground"
ACTIVITIES = ("lying", "walking", "sitting", "on all fours")


def row(name: str = "A01", tag: int = 0, ms: float = 0, xyz: str = "1,2,3", label: str = "walking") -> str:
    return f"{name},{TAGS[tag]},{START + round(ms * 10_000)},27.05.2009 14:03:25:128,{xyz},{label}"


def made_up(points: int, recordings: int = 5) -> list[str]:
    """Tags take turns every 27 ms; every 60 points another activity, which the height (z) gives away."""
    return [
        row(f"A{number:02}", i % 4, 27 * i, f"{number},{i % 7},{kind}.5", ACTIVITIES[kind])
        for number in range(1, recordings + 1)
        for i in range(points)
        for kind in [(i // 60 + number) % len(ACTIVITIES)]
    ]


def write(folder: Path, rows: list[str], name: str = FILE) -> Path:
    data = "".join(f"{line}\n" for line in rows).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder / name


def recordings(folder: Path, rows: list[str]) -> list[Recording]:
    return recordings_of(read_rows(write(folder, rows)))


def by_loop(rows: list[str]) -> list[tuple[int, list[float], set[int]]]:
    """Time, 12 running averages and classes of the points of one recording, the way the protocol words it."""
    points: list[tuple[int, list[float], set[int]]] = []
    seen: dict[int, int] = {}
    first = float(rows[0].split(",")[2])
    for line in rows:
        _, tag, ticks, _, *xyz, label = line.split(",")
        time, at = round((float(ticks) - first) / 1e5), TAGS.index(tag)
        if not points or time != points[-1][0]:
            points.append((time, [0.0] * 12, set()))
            seen = dict.fromkeys(range(4), 0)
        for axis, value in enumerate(xyz):
            mean = points[-1][1][3 * at + axis]
            points[-1][1][3 * at + axis] = (mean * seen[at] + float(value)) / (seen[at] + 1)
        seen[at] += 1
        points[-1][2].update({LABELS[label]} - {-1})
    return points


def test_a_tiny_file_by_hand(tmp_path: Path) -> None:
    """24 and 26 ms are points 2 and 3; rows at one point merge, the same tag's by their mean; recordings start at 0."""
    rows = [
        row(tag=0, ms=0, xyz="1,2,3"),
        row(tag=2, ms=24, xyz="4,5,6", label="falling"),
        row(tag=3, ms=26, xyz="1,1,1", label="lying down"),
        row(tag=3, ms=28, xyz="3,5,7", label="lying"),
        row(tag=1, ms=31, xyz="9,9,9", label="sitting down"),
        row("B02", tag=1, ms=5_000, xyz="0,-2,0", label="on all fours"),
        row("C03", tag=1, ms=9_000),
    ]
    first, second, third = recordings(tmp_path, rows)
    assert (first.name, second.name, third.name) == ("A01", "B02", "C03")
    assert [found.time.tolist() for found in (first, second, third)] == [[0, 2, 3], [0], [0]]
    assert first.values.tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 4, 5, 6, 0, 0, 0],
        [0, 0, 0, 9, 9, 9, 0, 0, 0, 2, 3, 4],
    ]
    assert first.mask.tolist() == (first.values != 0).tolist()
    assert [np.flatnonzero(labels).tolist() for labels in first.labels] == [[0], [1], [2, 3]]
    assert second.values[0].tolist() == [0, 0, 0, 0, -2, 0, 0, 0, 0, 0, 0, 0]
    assert second.mask[0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0], "a zero can be observed too"
    assert first.labels.shape == (3, CLASSES) and first.values.dtype == first.mask.dtype == np.float32


def test_merging_equals_the_plain_loop(tmp_path: Path) -> None:
    """Crowded and backward-stepping times, all labels."""
    random = np.random.RandomState(0)
    times = np.cumsum(random.choice([-5, 0, 2, 4, 27], 400))
    rows = [
        row(tag=random.randint(4), ms=ms, xyz=f"{ms},{i},0.25", label=list(LABELS)[i // 5 % len(LABELS)])
        for i, ms in enumerate(times)
    ]
    (found,) = recordings(tmp_path, rows)
    expected = by_loop(rows)
    assert len(expected) < 400 and found.time.tolist() == [time for time, _, _ in expected]
    assert np.allclose(found.values, [values for _, values, _ in expected], rtol=1e-5)
    assert [set(np.flatnonzero(labels)) for labels in found.labels] == [labels for _, _, labels in expected]


MERGED = (
    ["walking", GROUND], ["falling"], ["lying", "lying down"], ["sitting", "sitting down"],
    ["standing up from lying", "standing up from sitting"], ["on all fours"], ["sitting on the ground"],
)  # fmt: skip


@pytest.mark.parametrize(("number", "label"), [(n, label) for n, labels in enumerate(MERGED) for label in labels])
def test_labels_merge_and_the_unmatched_spelling_falls_to_class_0(tmp_path: Path, number: int, label: str) -> None:
    (found,) = recordings(tmp_path, [row(ms=27 * i, label=label) for i in range(WINDOW + 1)])
    assert int(found.labels.sum()) == (0 if label == GROUND else WINDOW + 1)
    assert bool((windows_of([found]).classes == number).all())


@pytest.mark.parametrize(("points", "count"), [(49, 0), (50, 0), (51, 1), (75, 1), (76, 2), (101, 3)])
def test_windows_end_before_the_last_time_point(tmp_path: Path, points: int, count: int) -> None:
    (found,) = recordings(tmp_path, made_up(points, 1))
    windows = windows_of([found])
    assert windows.time.shape == (count, WINDOW) and windows.values.shape == (count, WINDOW, 24)
    for index in range(count):
        cut = slice(STRIDE * index, STRIDE * index + WINDOW)
        assert windows.time[index].tolist() == (found.time[cut] - found.time[cut][0]).tolist()
        assert np.array_equal(windows.values[index], np.hstack([found.values[cut], found.mask[cut]]))
        assert np.array_equal(windows.classes[index], found.labels[cut].argmax(axis=1))


def test_windows_are_sorted_by_time_values_and_classes_along(tmp_path: Path) -> None:
    times = [20 * i for i in range(60)]
    for i in (0, 10):
        times[i], times[i + 1] = times[i + 1], times[i]
    label = ["walking"] * 10 + ["falling", "lying"] + ["sitting"] * 48
    rows = [row(tag=i % 4, ms=ms, xyz=f"{ms},0,0", label=label[i]) for i, ms in enumerate(times)]
    windows = windows_of(recordings(tmp_path, rows))
    assert windows.time[0].tolist() == [2 * i for i in range(WINDOW)]
    assert windows.values[0, :, :12].sum(axis=1).tolist() == [20 * i for i in range(WINDOW)]
    assert windows.classes[0].tolist() == [0] * 10 + [2, 1] + [3] * 38


def test_the_papers_split_has_its_sizes_and_order() -> None:
    """Test windows are the first fifth of numpy's permutation 42, as scikit-learn deals them."""
    parts = shuffled_indices(6_554)
    assert [len(part) for part in parts] == [4_194, 1_049, 1_311]
    assert sorted(np.concatenate(parts).tolist()) == list(range(6_554))
    shuffled = np.random.RandomState(42).permutation(6_554)
    assert np.array_equal(parts.test, shuffled[:1_311])
    assert np.array_equal(parts.validation, shuffled[1_311:][np.random.RandomState(11).permutation(5_243)[:1_049]])


def test_the_split_by_recording_shares_none() -> None:
    owner = np.repeat(np.arange(25), np.arange(1, 26))
    parts = recording_indices(owner)
    owners = [set(owner[part].tolist()) for part in parts]
    assert [len(part) for part in owners] == [16, 4, 5]
    assert len(set.union(*owners)) == 25 and sum(map(len, parts)) == len(owner)
    assert all(np.array_equal(a, b) for a, b in zip(parts, recording_indices(owner), strict=True))


@pytest.mark.parametrize("split", ["paper", "recording"])
def test_batches_hold_times_values_masks_and_classes(tmp_path: Path, split: Split) -> None:
    task = ActivityTask(write(tmp_path, made_up(300)), split)
    assert list(task.sizes.values()) == ([32, 8, 10] if split == "paper" else [30, 10, 10])
    for batch in (task.sample(7, task.training(0)), *task.validation(), *task.test()):
        batch.validate()
        assert batch.xc.shape[1:] == (50, 1) and batch.yc.shape[1:] == (50, 24) and batch.yt.shape[1:] == (50,)
        assert batch.yc.dtype == torch.float32 and batch.yt.dtype == torch.int64
        assert torch.equal(batch.xc, batch.xt) and bool((batch.xc[:, 0] == 0).all())
        assert bool((batch.yc[..., 12:].sum(dim=-1) == 3).all())  # one tag a time point
        assert bool((batch.yc[..., :12][batch.yc[..., 12:] == 0] == 0).all())
    (whole,) = task.test()
    assert task.test_batches == 1
    assert float(whole.xc.max()) == 1.0 and len(whole.xc) == task.sizes["test"]
    assert torch.equal(torch.cat([batch.yc for batch in task.test(size=4)]), whole.yc)


def test_training_windows_come_from_the_training_part_alone(tmp_path: Path) -> None:
    """x is the number of the recording: no part shows one that another has."""
    task = ActivityTask(write(tmp_path, made_up(200)), "recording")
    parts = [task.sample(200, task.training(0)), *task.validation(), *task.test()]
    seen = [set(part.yc[..., [0, 3, 6, 9]].unique().tolist()) - {0.0} for part in parts]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 5
    again = task.sample(200, task.training(0))
    assert torch.equal(parts[0].yc, again.yc) and not torch.equal(again.yc, task.sample(200, task.training(1)).yc)


def test_crops_lose_first_points_and_start_at_time_0(tmp_path: Path) -> None:
    task = ActivityTask(write(tmp_path, made_up(300)), crop=10)
    whole = ActivityTask(write(tmp_path, made_up(300))).sample(64, task.training(0))
    batch = task.sample(64, task.training(0)).validate()
    assert batch.context_mask is not None and batch.target_mask is batch.context_mask
    gone = (~batch.context_mask).sum(dim=1)
    assert gone.unique().tolist() == list(range(11))  # all lengths occur, the last points are always there
    for row, first in enumerate(gone.tolist()):
        assert batch.context_mask[row, first:].all()
        torch.testing.assert_close(batch.xc[row, first:], whole.xc[row, first:] - whole.xc[row, first])
        assert torch.equal(batch.yc[row], whole.yc[row]) and torch.equal(batch.yt[row], whole.yt[row])
    assert all(part.context_mask is None for part in (*task.validation(), *task.test()))


def test_the_metric_is_accuracy_per_time_point() -> None:
    x, logits = torch.zeros(1, 4, 1), 9.0 * torch.nn.functional.one_hot(torch.tensor([[0, 3, 6, 2]]), CLASSES)
    batch = Batch(x, torch.zeros(1, 4, 24), x, torch.tensor([[0, 3, 1, 2]]))
    assert ActivityTask.metric(Categorical(logits=logits), batch).tolist() == [[100.0, 100.0, 0.0, 100.0]]


def test_gzip_plain_and_folder_give_the_same(tmp_path: Path) -> None:
    rows = made_up(150)
    plain, packed = write(tmp_path, rows), write(tmp_path, rows, f"{FILE}.gz")
    (tmp_path / "root/person_activity").mkdir(parents=True)
    write(tmp_path / "root/person_activity", rows, f"{FILE}.gz")
    batches = [next(ActivityTask(path).test()) for path in (plain, str(packed), tmp_path, tmp_path / "root")]
    assert all(torch.equal(batch.yc, batches[0].yc) for batch in batches)


def test_the_file_is_read_once_per_task_and_again_when_it_changed(tmp_path: Path) -> None:
    file = write(tmp_path, made_up(150))
    task = ActivityTask(file)
    before = task.sizes
    write(tmp_path, made_up(300))
    os.utime(file, ns=(1, 1))
    assert task.sizes == before != ActivityTask(file).sizes
    file.unlink()
    assert len(task.sample(3, task.training(0)).xc) == 3


def cut_short(folder: Path) -> Path:
    file = write(folder, made_up(300), f"{FILE}.gz")
    file.write_bytes(file.read_bytes()[:-200])
    return file


def with_third_row(line: str) -> Callable[[Path], Path]:
    return lambda folder: write(folder, [*made_up(2, 1), line, *made_up(2, 1)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cut_short, "damaged after line [0-9]+"),
        (lambda folder: write(folder, []), "empty file"),
        (lambda folder: write(folder, [], f"{FILE}.gz"), "empty file"),
        (lambda folder: write(folder, [row(name="")]), "line 1: expected the rows of a recording together, .*''"),
        (with_third_row(row().replace(",2,3", ",2")), "line 3: expected 8 columns .*got 7"),
        (with_third_row(""), "line 3: expected 8 columns .*got 1"),
        (with_third_row(row().replace(TAGS[0], "010-000-000-000")), "line 3: expected a tag .*'010-000-000-000'"),
        (with_third_row(row(xyz="1,nan,3")), "line 3: expected finite .*nan"),
        (with_third_row(row(xyz="1,two,3")), "line 3: expected numbers .*two"),
        (with_third_row(row().replace(str(START), "noon")), "line 3: expected numbers .*noon"),
        (with_third_row(row(label="flying")), "line 3: expected one of the known activities, got 'flying'"),
        (with_third_row(row(name="B01")), "line 4: expected the rows of a recording together, .*'A01'"),
        (lambda folder: write(folder, made_up(50)), r"expected windows .*\[0, 0, 0\]"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    task = ActivityTask(make(tmp_path))
    with pytest.raises(DataError, match=message) as caught:
        task.sample(1, task.training(0))
    assert str(task.path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_gzip_or_no_text_are_refused(tmp_path: Path) -> None:
    for name, data in {"a.gz": b"A01,plain text", "b.txt": b"\x1f\x8b\xff\xfe"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name}: damaged after line 0"):
            _ = ActivityTask(tmp_path / name).sizes


def test_an_absent_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"looked for .*{FILE}, .*person_activity/{FILE}.gz"):
        _ = ActivityTask(tmp_path).sizes
    with pytest.raises(DataError, match=f"looked for {tmp_path}/other.txt"):
        _ = ActivityTask(tmp_path / "other.txt").sizes


def test_a_split_by_recording_needs_three(tmp_path: Path) -> None:
    file = write(tmp_path, made_up(300, 2))
    assert ActivityTask(file).sizes["train"] > 0
    with pytest.raises(DataError, match="by recording, got"):
        _ = ActivityTask(file, "recording").sizes


def test_unusable_settings_are_refused() -> None:
    with pytest.raises(InputError, match="crop: expected fewer than the 50 points of a window, got 50"):
        ActivityTask("x", crop=50)
    with pytest.raises(InputError, match="split: expected one of paper, recording"):
        ActivityTask("somewhere", "people")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="path: expected a path"):
        ActivityTask(None)  # type: ignore[arg-type]


def test_training_improves_on_a_small_file(tmp_path: Path) -> None:
    task = ActivityTask(write(tmp_path, made_up(400)))
    torch.manual_seed(0)
    model = TransformerCA(dim_y=24, outputs=CLASSES, head="categorical", encoder="identity", dim=32, heads=2, hidden=32)
    before = evaluate(model, task, task.validation())
    history = fit(model, task, TrainConfig(steps=250, batch=16, lr=3e-3, warmup=20, evaluate_every=125))
    assert before < 60 and history[-1].metric > before + 20


@pytest.mark.skipif(not REAL.exists(), reason="the data is not here")
def test_the_whole_file_has_the_known_counts() -> None:
    rows = read_rows(REAL)
    found = recordings_of(rows)
    assert len(rows.ticks) == 164_860 and len(found) == 25
    assert [len(recording.time) for recording in found[:2]] == [5_829, 5_691]
    assert len(windows_of(found).time) == 6_555
    assert ActivityTask(REAL).sizes == {"train": 4_195, "validation": 1_049, "test": 1_311}
    assert sum(ActivityTask(REAL, "recording").sizes.values()) == 6_555
