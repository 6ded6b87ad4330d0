"""Pictures of completed images: every pixel at its place, given ones as they are, nothing else shown as given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from retreever import InputError, PerceiverIO, ReTreever, TransformerCA
from retreever.lab.figures.images import NEUTRAL, complete_all, draw_completions

image = pytest.importorskip("matplotlib.image")


class Places(nn.Module):
    """Predicts a quarter of a pixel's row, and in the second channel of its column; its std grows with the row."""

    def predict(self, xc: Tensor, yc: Tensor, xt: Tensor, mask: Tensor | None = None) -> Distribution:
        channels = torch.cat([xt, xt[..., :1]], dim=-1)[..., : yc.shape[-1]]
        std = (1.5 + xt[..., :1]).expand_as(channels)
        return Independent(Normal(channels / 4, std), 1)


def images(count: int, height: int, width: int, channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, height, width, channels), generator=generator, dtype=torch.uint8)


sizes = {"height": st.integers(2, 9), "width": st.integers(2, 9), "channels": st.sampled_from([1, 3])}


@settings(max_examples=30, deadline=None)
@given(**sizes, share=st.floats(0, 1), seed=st.integers(0, 99))
def test_given_pixels_are_those_of_the_image_and_as_many_as_asked(
    height: int, width: int, channels: int, share: float, seed: int
) -> None:
    pictures = images(2, height, width, channels, seed)
    context = max(1, round(share * height * width))
    done = complete_all(Places(), pictures, context, seed)
    ground = torch.tensor(NEUTRAL)
    shown = ~(done.given == ground).all(dim=-1)
    assert shown.sum(dim=(1, 2)).tolist() == [context, context]
    assert torch.allclose(done.given[shown], (pictures / 255).expand(-1, -1, -1, 3)[shown], atol=1e-6)
    assert torch.equal(done.truth, pictures / 255)
    more = complete_all(Places(), pictures, height * width, seed)
    assert torch.allclose(more.given, more.truth.expand(-1, -1, -1, 3), atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(**sizes)
def test_predictions_stand_at_their_pixels(height: int, width: int, channels: int) -> None:
    done = complete_all(Places(), images(1, height, width, channels), 1)
    row, column = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)[None]
    assert torch.allclose(done.mean[0, ..., 0], (row / 4 + 0.5).expand(height, width), atol=1e-6)
    if channels == 3:
        assert torch.allclose(done.mean[0, ..., 1], (column / 4 + 0.5).expand(height, width), atol=1e-6)
    assert torch.allclose(done.std[0], (1.5 + row).expand(height, width), atol=1e-5)


def test_a_larger_context_holds_the_smaller_one_and_a_seed_draws_it_again() -> None:
    pictures = images(3, 6, 5, 1)
    few, more, again, other = (
        (complete_all(Places(), pictures, size, seed).given != torch.tensor(NEUTRAL)).any(dim=-1)
        for size, seed in ((5, 0), (12, 0), (5, 0), (5, 1))
    )
    assert (more | ~few).all() and torch.equal(few, again) and not torch.equal(few, other)
    assert not torch.equal(few[0], few[1])  # every image has its own


@pytest.mark.parametrize(("kind", "channels"), [(ReTreever, 1), (ReTreever, 3), (TransformerCA, 1), (PerceiverIO, 3)])
def test_a_row_per_image_is_drawn(kind: type[nn.Module], channels: int, tmp_path: Path) -> None:
    model: Any = kind(dim_x=2, dim_y=channels, dim=8, heads=2, layers=1, hidden=8, head="bounded")
    shapes = []
    for count in (1, 3):
        file = draw_completions(model, images(count, 8, 6, channels), tmp_path / "new" / f"{count}.png", context=(3, 9))
        assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        shapes.append(image.imread(file).shape)
    assert shapes[0][1] == shapes[1][1] and shapes[0][0] < shapes[1][0]


@pytest.mark.parametrize(
    ("pictures", "context", "named"),
    [
        (images(1, 4, 4, 1), (17,), "context: expected at most the 16 pixels"),
        (images(1, 4, 4, 1), (0,), "context: expected an int >= 1"),
        (images(1, 4, 4, 1), (), "context: expected at least one"),
        (images(1, 4, 4, 2), (3,), "images: expected bytes"),
        (images(1, 4, 4, 1) / 255, (3,), "images: expected bytes"),
        (images(1, 4, 4, 1)[0], (3,), "images: expected shape"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    tmp_path: Path, pictures: Tensor, context: tuple[int, ...], named: str
) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        draw_completions(Places(), pictures, tmp_path / "a.png", context)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_classes_is_refused(tmp_path: Path) -> None:
    model = ReTreever(dim_x=2, dim=8, heads=2, layers=1, hidden=8, head="categorical")
    with pytest.raises(InputError, match=r"^model: expected one that predicts values"):
        draw_completions(model, images(1, 4, 4, 1), tmp_path / "a.png", (3,))
