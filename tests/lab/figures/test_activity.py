"""Pictures of activities: strips cover the window without gap or overlap, under the names the file uses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical

from retreever import Batch, InputError, PerceiverIO, ReTreever, TransformerCA
from retreever.data.activity_file import CLASSES, LABELS, NO_CLASS
from retreever.lab.figures.activity import ACTIVITIES, channels_of, draw_activity, name_of, spans_of

image = pytest.importorskip("matplotlib.image")
colors = pytest.importorskip("matplotlib.colors")
TINY: dict[str, Any] = {"dim": 8, "heads": 2, "layers": 1, "hidden": 8}


class Always(nn.Module):
    """Predicts one class everywhere."""

    def __init__(self, activity: int) -> None:
        super().__init__()
        self.activity = activity

    def predict(self, xc: Tensor, yc: Tensor, xt: Tensor, mask: Tensor | None = None) -> Categorical:
        return Categorical(logits=torch.eye(CLASSES)[self.activity].expand(*xt.shape[:2], CLASSES))


def windows(activity: int = 0) -> Batch:
    """Two windows of 50 moments, a third of the tags seen at each; the second is of one activity."""
    generator = torch.Generator().manual_seed(0)
    time = torch.rand(2, 50, 1, generator=generator).sort(dim=1).values
    seen = (torch.rand(2, 50, 4, generator=generator) < 0.3).float().repeat_interleave(3, dim=2)
    values = torch.randn(2, 50, 12, generator=generator) * seen
    classes = torch.stack([torch.arange(50) // 8, torch.full((50,), activity)])
    return Batch(time, torch.cat([values, seen], dim=-1), time, classes)


def amount(file: Path, colour: str) -> int:
    """Pixels of exactly this colour."""
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = torch.tensor(image.imread(file))[..., :3]
    return int(((picture - torch.tensor(colors.to_rgb(colour))).abs().amax(dim=-1) < 0.01).sum())


@settings(max_examples=50, deadline=None)
@given(activities=st.lists(st.integers(0, 10), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_spans_cover_the_window_without_gap_or_overlap(activities: list[int], seed: int) -> None:
    """Each moment lies in a span of its own activity; neighbours differ."""
    steps = 0.1 + torch.rand(len(activities), generator=torch.Generator().manual_seed(seed))
    time = steps.cumsum(0)
    spans = spans_of(time, activities)
    assert spans[0].start == float(time[0]) and spans[-1].stop == float(time[-1])
    assert all(a.stop == b.start and a.activity != b.activity for a, b in pairwise(spans))
    for moment, activity in zip(time.tolist(), activities, strict=True):
        assert activity in [span.activity for span in spans if span.start <= moment <= span.stop]


def test_names_are_those_of_the_file() -> None:
    """Every label begins with the name of its class; the labels use all names and no others."""
    used = {label: number for label, number in LABELS.items() if number != NO_CLASS}
    assert all(label.startswith(name_of(number)) for label, number in used.items())
    assert set(used.values()) == set(range(len(ACTIVITIES)))
    assert "no label" in name_of(CLASSES - 1)


def test_channels_are_values_and_what_was_seen() -> None:
    batch = windows()
    values, seen = channels_of(batch.yc[0])
    assert values.shape == seen.shape == (50, 12) and seen.dtype == torch.bool
    assert torch.equal(values != 0, seen)


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA, PerceiverIO])
def test_every_model_is_drawn(kind: type[nn.Module], tmp_path: Path) -> None:
    model: Any = kind(**TINY, dim_y=24, outputs=CLASSES, head="categorical")
    file = draw_activity(model, windows(), tmp_path / "new" / "activity.png")
    assert file.stat().st_size > 10_000 and [path.name for path in file.parent.iterdir()] == ["activity.png"]


def test_right_and_wrong_predictions_show_as_such(tmp_path: Path) -> None:
    """Walking throughout, blue: two strips where that is predicted, one where lying, green, is."""
    batch, blue, green = windows(), "#0072b2", "#009e73"
    right = draw_activity(Always(0), batch, tmp_path / "right.png", window=1)
    wrong = draw_activity(Always(2), batch, tmp_path / "wrong.png", window=1)
    assert amount(right, green) == 0 and amount(right, blue) > 1.8 * amount(wrong, blue)
    assert amount(wrong, green) > 0.8 * amount(wrong, blue)


@pytest.mark.parametrize(
    ("model", "batch", "window", "named"),
    [
        (Always(0), windows(), 2, "window: expected a row of the batch, below 2"),
        (Always(0), windows(), -1, "window: expected an int >= 0"),
        (Always(0), Batch(*(torch.zeros(1, 5, 1),) * 4), 0, "batch: expected windows of 12 channels"),
        (ReTreever(**TINY, dim_y=24), windows(), 0, "model: expected one that predicts classes"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    tmp_path: Path, model: Any, batch: Batch, window: int, named: str
) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        draw_activity(model, batch, tmp_path / "a.png", window)
    assert list(tmp_path.iterdir()) == []
