"""Pictures are valid, show what the search did, and replace files in one go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from retreever.errors import BackendError, InputError, RetreeverError
from retreever.explanation import Explanation, explain
from retreever.lab.figures.retrieval import draw_curves, draw_retrieval
from retreever.results import TreeCrossAttentionResult
from retreever.tree.plan import TreePlan

image = pytest.importorskip("matplotlib.image")
colors = pytest.importorskip("matplotlib.colors")

YELLOW, GREY, RED, GREEN, STAR = "#f6d55c", "#a9aeb4", "#d1495b", "#12a074", "#1f4e9c"
HISTORIES = {
    "ReTreever": [{"step": s, "loss": 1 / (s + 1), "accuracy": s / 100, "seconds": 0.1 * s} for s in range(0, 100, 5)],
    "Perceiver IO": [{"step": s, "loss": 2 / (s + 1), "seconds": 0.2 * s} for s in range(3)]
    + [{"step": 50, "loss": 0.1, "accuracy": 0.4, "seconds": 9.0}],
}


def search(n: int, branch: int, path: int, padding: tuple[int, ...] = ()) -> Explanation:
    """A search in a tree over n tokens; `padding` names nodes that cover none."""
    plan = TreePlan(n, branch)
    mask = torch.ones(1, plan.nodes, dtype=torch.bool)
    mask[0, [node - 1 for node in padding]] = False
    zeros = torch.zeros(1, 1)
    return explain(
        TreeCrossAttentionResult(zeros[..., None], torch.tensor([[path]]), zeros, zeros, plan, mask, "policy")
    )


def pixels(file: Path) -> torch.Tensor:
    """The picture, (height, width, 3), once it has been seen to be a PNG."""
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return torch.tensor(image.imread(file))[..., :3]


def amount(picture: torch.Tensor, colour: str) -> int:
    """Pixels of exactly this colour."""
    return int(((picture - torch.tensor(colors.to_rgb(colour))).abs().amax(dim=-1) < 0.01).sum())


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The picture of the appendix's example."""
    return pixels(draw_retrieval(search(8, 2, 1), tmp_path_factory.mktemp("paper") / "search.png"))


@pytest.mark.parametrize(("n", "branch", "path", "wide"), [(64, 4, 6, 2), (3, 4, 0, 2)])
def test_a_search_becomes_a_row_of_panels(tmp_path: Path, n: int, branch: int, path: int, wide: int) -> None:
    file = draw_retrieval(search(n, branch, path), tmp_path / "search.png")
    height, width, _ = pixels(file).shape
    assert width >= wide * 500 and height >= 200


def test_all_four_colours_show_and_the_star_only_when_asked(paper: torch.Tensor, tmp_path: Path) -> None:
    starred = pixels(draw_retrieval(search(8, 2, 1), tmp_path / "starred.png", truth=3))
    assert all(amount(paper, colour) > 200 for colour in (YELLOW, GREY, RED, GREEN))
    assert amount(paper, STAR) == 0 < amount(starred, STAR)


def test_where_nothing_is_rejected_red_is_left_to_the_legend(paper: torch.Tensor, tmp_path: Path) -> None:
    """Three leaves under the root are all read."""
    assert 10 * amount(pixels(draw_retrieval(search(3, 4, 0), tmp_path / "all.png")), RED) < amount(paper, RED)


def test_padding_is_drawn_faint(paper: torch.Tensor, tmp_path: Path) -> None:
    """Nodes 13 and 14 hollow instead of coloured."""
    padded = pixels(draw_retrieval(search(8, 2, 1, padding=(13, 14)), tmp_path / "padded.png"))
    assert all(amount(padded, colour) < 0.95 * amount(paper, colour) for colour in (RED, YELLOW))


@pytest.mark.parametrize("truth", [-1, 8])
def test_an_answer_outside_the_tree_is_refused(tmp_path: Path, truth: int) -> None:
    with pytest.raises(InputError, match="truth"):
        draw_retrieval(search(8, 2, 1), tmp_path / "a.png", truth=truth)


def test_curves_have_one_colour_per_run(tmp_path: Path) -> None:
    picture = pixels(draw_curves(HISTORIES, tmp_path / "curves.png", title="Copy task"))
    assert picture.shape[:2] == (645, 1500)
    assert amount(picture, "#0072b2") > 500 and amount(picture, "#e69f00") > 50


def test_curves_of_another_metric_and_of_more_runs_than_colours(tmp_path: Path) -> None:
    many = {f"run {i}": [{"step": s, "loss": i + s, "seconds": s} for s in range(30)] for i in range(9)}
    assert pixels(draw_curves(many, tmp_path / "many.png", metric="loss")).shape[2] == 3


@pytest.mark.parametrize("histories", [{}, {"a": []}, HISTORIES | {"b": [{"step": 0, "seconds": 0.0, "loss": 1.0}]}])
def test_runs_without_the_metric_are_named(tmp_path: Path, histories: dict[str, list[dict[str, float]]]) -> None:
    with pytest.raises(InputError, match=r"'accuracy'.*none for (a|b|any run)$"):
        draw_curves(histories, tmp_path / "a.png")


@pytest.mark.parametrize("draw", [lambda f: draw_retrieval(search(3, 4, 0), f), lambda f: draw_curves(HISTORIES, f)])
def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path, draw: Callable[[str], Path]) -> None:
    file = draw(str(tmp_path / "new" / "folder" / "picture.png"))
    assert [path.name for path in file.parent.iterdir()] == ["picture.png"]


def test_a_failed_write_leaves_the_old_picture_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "curves.png"
    file.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RetreeverError, match=r"curves\.png: cannot be written: disk full"):
        draw_curves(HISTORIES, file)
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    draw_curves(HISTORIES, tmp_path / "curves.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"retreever\[plot\]"):
        draw_curves(HISTORIES, tmp_path / "curves.png")
