"""Batches in fixed rooms: the paper's sizes, the same law as exact batches, and the same losses."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retreever import Batch, PerceiverIO, ReTreever, TransformerCA
from retreever.tasks import gp, images
from retreever.tasks.gp import GPTask
from retreever.tasks.images import ImageTask
from retreever.tasks.padding import Law, Room, balanced_sizes, draw_sizes, rooms_for
from retreever.tasks.seeds import stream


class Pictures(ImageTask):
    name, validation_images = "pictures", 2

    def __init__(self, sizes: Law = "batch") -> None:
        self.sizes = sizes

    @property
    def training_images(self) -> torch.Tensor:
        return torch.arange(5 * 20 * 20, dtype=torch.int64).reshape(5, 20, 20, 1).remainder(256).to(torch.uint8)

    test_images = training_images


@given(st.integers(0, 2**32), st.sampled_from([(50, gp.ROOMS), (200, images.ROOMS)]))
def test_sizes_follow_the_paper_and_fit_their_room(seed: int, case: tuple[int, tuple[Room, ...]]) -> None:
    most, rooms = case
    n, m, room = draw_sizes(most, rooms, torch.Generator().manual_seed(seed))
    assert 3 <= n <= most - 4 and 3 <= m <= most - 1 - n
    assert n <= room.context and m <= room.target and room in rooms


def test_fixed_sets_have_their_share_of_all_sizes() -> None:
    sizes = balanced_sizes(50, torch.Generator().manual_seed(5))
    drawn = [next(sizes) for _ in range(4400)]
    counts = Counter(n for n, _ in drawn)
    assert set(counts) == set(range(3, 47)) and all(95 <= count <= 105 for count in counts.values())
    assert all(3 <= m <= 49 - n for n, m in drawn)
    many = [m for n, m in drawn if n == 10]
    assert min(many) == 3 and max(many) == 39 and abs(sum(many) / len(many) - 21) < 1


def test_every_room_is_used_and_every_size_has_one() -> None:
    for most, rooms in ((50, gp.ROOMS), (200, images.ROOMS)):
        used = Counter()
        for n in range(3, most - 3):
            for m in range(3, most - n):
                used[min(room for room in rooms if room.context >= n and room.target >= m)] += 1
        assert set(used) == set(rooms)


def test_rooms_have_fewer_targets_where_contexts_are_many() -> None:
    assert rooms_for(50, (16, 32, 46)) == ((16, 46), (32, 32), (46, 16))
    assert rooms_for(50, (46,), parts=2) == ((46, 23), (46, 46))


@pytest.mark.parametrize("task", [GPTask(), Pictures()], ids=["gp", "images"])
def test_padded_batches_are_whole_and_repeatable(task: GPTask | Pictures) -> None:
    sizes = task.draw_sizes(stream("padding", "train", 1))
    numbers = torch.tensor(sizes[:2])
    one, two = (task.sample_padded(6, torch.Generator().manual_seed(3), numbers, sizes.room) for _ in range(2))
    one.validate()
    assert one.context_mask is not None and one.target_mask is not None
    assert one.xc.shape[1] == sizes.room.context and one.xt.shape[1] == sizes.room.target
    assert (one.context_mask.sum(1) == sizes.n).all() and (one.target_mask.sum(1) == sizes.m).all()
    assert torch.equal(one.xc, two.xc) and torch.equal(one.yt, two.yt)


def test_padded_functions_are_drawn_as_exact_ones() -> None:
    """Sorted, in range, of the same spread; and context and target lie on one smooth function."""
    task, sizes = GPTask("rbf"), torch.tensor([20, 12])
    batch = task.sample_padded(512, torch.Generator().manual_seed(0), sizes, Room(32, 32))
    xc, yc, xt, yt = batch.xc[:, :20, 0], batch.yc[:, :20, 0], batch.xt[:, :12, 0], batch.yt[:, :12, 0]
    assert (xc.diff(dim=1) >= 0).all() and (xt.diff(dim=1) >= 0).all()
    assert float(xc.min()) >= -2 and float(xc.max()) < 2 and abs(float(xc.mean())) < 0.05
    drawn = 0.1 + 0.9 * torch.rand(10**5, generator=torch.Generator().manual_seed(1))
    assert abs(float(yc.square().mean()) / float(drawn.square().mean()) - 1) < 0.15
    gap, nearest = (xt[:, :, None] - xc[:, None]).abs().min(dim=2)
    close = gap < 0.005
    assert close.sum() > 20
    assert float((yt - yc.gather(1, nearest)).abs()[close].mean()) < 0.1


def test_pixels_are_drawn_without_replacement_and_true() -> None:
    task, sizes = Pictures(), torch.tensor([30, 25])
    batch = task.sample_padded(4, torch.Generator().manual_seed(0), sizes, Room(64, 98))
    places = torch.cat([batch.xc[:, :30], batch.xt[:, :25]], dim=1)
    assert all(len({tuple(p) for p in row.tolist()}) == 55 for row in places)
    assert float(batch.yc.min()) >= -0.5 and float(batch.yc.max()) <= 0.5


@pytest.mark.parametrize("task", [GPTask(sizes="each"), Pictures("each")], ids=["gp", "images"])
def test_each_task_of_a_batch_can_have_a_context_size_of_its_own(task: GPTask | Pictures) -> None:
    """Of the law of the paper, with the same targets for all; without a GPU as in its graphs."""
    most = 50 if isinstance(task, GPTask) else 200
    sizes = task.draw_sizes(torch.Generator().manual_seed(0))
    assert sizes == task.draw_sizes(torch.Generator().manual_seed(1)) == (most - 4, sizes.m, (most - 4, sizes.m))
    batch = task.sample(4_000, torch.Generator().manual_seed(0)).validate()
    assert batch.context_mask is not None and batch.target_mask is not None and batch.target_mask.all()
    counts = batch.context_mask.sum(dim=1)
    assert counts.min() == 3 and counts.max() == most - 4
    assert abs(float(counts.double().mean()) - (most - 1) / 2) < 0.02 * most
    padded = task.sample_padded(4_000, torch.Generator().manual_seed(0), torch.tensor(sizes[:2]), sizes.room)
    assert torch.equal(padded.xc, batch.xc) and torch.equal(padded.yt, batch.yt)


def test_functions_of_many_sizes_are_sorted_and_on_one_curve() -> None:
    batch = GPTask("rbf", sizes="each").sample(512, torch.Generator().manual_seed(0))
    assert batch.context_mask is not None
    xc, yc, xt, yt = (part[..., 0] for part in (batch.xc, batch.yc, batch.xt, batch.yt))
    real = batch.context_mask
    assert (xc.diff(dim=1)[real[:, 1:]] >= 0).all() and (xt.diff(dim=1) >= 0).all()
    assert all(float(x.min()) >= -2 and float(x.max()) < 2 for x in (xc, xt))
    gap, nearest = (xt[:, :, None] - xc[:, None]).abs().masked_fill(~real[:, None], 9).min(dim=2)
    close = gap < 0.005
    assert close.sum() > 20 and float((yt - yc.gather(1, nearest)).abs()[close].mean()) < 0.1


def test_images_too_small_for_all_targets_have_fewer() -> None:
    class Stamps(Pictures):
        @property
        def training_images(self) -> torch.Tensor:
            return super().training_images[:, :16, :16]

    batch = Stamps("each").sample(64, torch.Generator().manual_seed(0)).validate()
    assert batch.context_mask is not None and batch.target_mask is not None
    assert (batch.target_mask.sum(1) == (256 - batch.context_mask.sum(1)).clamp_max(64)).all()


def test_fixed_sets_do_not_depend_on_how_sizes_are_trained_on() -> None:
    pairs = zip(GPTask().validation(2), GPTask(sizes="each").validation(2), strict=True)
    assert all(torch.equal(one.xc, other.xc) and one.context_mask is None for one, other in pairs)


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA, PerceiverIO])
def test_padding_changes_no_loss(kind: type) -> None:
    """The padded batch and its real points alone give the same loss and the same gradients."""
    torch.manual_seed(0)
    task, sizes = GPTask(), torch.tensor([11, 5])
    padded = task.sample_padded(3, torch.Generator().manual_seed(2), sizes, Room(32, 32))
    exact = Batch(padded.xc[:, :11], padded.yc[:, :11], padded.xt[:, :5], padded.yt[:, :5])
    model = kind(dim=16, layers=1, hidden=16).double().eval()
    losses = []
    for batch in (padded, exact):
        parts = {"xc": batch.xc.double(), "yc": batch.yc.double(), "xt": batch.xt.double(), "yt": batch.yt.double()}
        loss = model.loss(Batch(**parts, context_mask=batch.context_mask, target_mask=batch.target_mask))
        losses.append(
            [loss.total.detach(), *torch.autograd.grad(loss.total, list(model.parameters()), allow_unused=True)]
        )
    for one, other in zip(*losses, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-10)
