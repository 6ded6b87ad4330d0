"""Pictures are valid, show what the search did, and replace files in one go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.attention import TreeCrossAttention
from retreever.attention_build import TokenOrder
from retreever.errors import BackendError, InputError, RetreeverError
from retreever.explanation import Explanation, explain
from retreever.lab.figures import retrieval
from retreever.lab.figures.retrieval import draw_curves, draw_retrieval
from retreever.lab.figures.style import save
from retreever.lab.recipes.figures import draw_search
from retreever.lab.recipes.recipe import make_recipe
from retreever.models.retreever import ReTreever
from retreever.results import TreeCrossAttentionResult
from retreever.tasks.copy import CopyTask
from retreever.tree.nodes import level_of
from retreever.tree.plan import TreePlan

image = pytest.importorskip("matplotlib.image")
colors = pytest.importorskip("matplotlib.colors")

YELLOW, GREY, RED, GREEN, STAR = "#f6d55c", "#a9aeb4", "#d1495b", "#12a074", "#1f4e9c"
DARK_ARROW, GREEN_ARROW = "#4a4f55", "#0b7a57"
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


def budgeted(n: int, budget: int, branch: int = 2, order: TokenOrder = "keys") -> Explanation:
    """The search of a random attention that orders its tokens and has a budget."""
    torch.manual_seed(0)
    attention = TreeCrossAttention(8, 2, branch, order=order, budget=budget, impl="reference").eval()
    return explain(attention(4 * torch.randn(1, 1, 8), attention.build(torch.randn(1, n, 8))))


DRAWN: dict[tuple[Explanation, int | None], Any] = {}  # figures, which several tests look at


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`draw_retrieval`, which returns the figure once it is laid out in place of its file."""

    def draw(told: Explanation, truth: int | None = None) -> Any:
        if (told, truth) not in DRAWN:
            monkeypatch.setattr(retrieval, "save", lambda figure, file, _: (keep(figure), save(figure, file))[1])
            keep = partial(DRAWN.__setitem__, (told, truth))
            draw_retrieval(told, tmp_path / "kept.png", truth=truth)
        return DRAWN[told, truth]

    return draw


def panels(figure: Any) -> list[Any]:
    return [axis for axis in figure.axes if axis.get_title()]


def arrows(axis: Any) -> dict[tuple[float, float], str]:
    """Colour of the arrow to every place that has one."""
    found = [text for text in axis.texts if getattr(text, "arrow_patch", None)]
    return {tuple(arrow.xy): colors.to_hex(arrow.arrow_patch.get_edgecolor()) for arrow in found}


def circles(axis: Any, colour: str, marker: str = "o") -> set[tuple[float, float]]:
    """Places of the nodes of one colour."""
    lines = [line for line in axis.lines if line.get_marker() == marker and line.get_markerfacecolor() == colour]
    return {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines}


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


SEARCHES = [search(32, 2, 10), search(13, 3, 4, padding=(27,)), budgeted(32, 14), budgeted(21, 9, 3), budgeted(16, 16)]


@pytest.mark.parametrize("told", SEARCHES)
def test_arrows_are_green_to_nodes_read_and_dark_to_nodes_explored(
    told: Explanation, drawn: Callable[..., Any]
) -> None:
    """In every panel; at the end all nodes but the root have been reached or lie below one that is read."""
    figure = drawn(told)
    for axis in panels(figure):
        explored = circles(axis, GREY) | circles(axis, GREY, "D")
        want = dict.fromkeys(circles(axis, GREEN), GREEN_ARROW) | dict.fromkeys(explored, DARK_ARROW)
        del want[max(explored, key=lambda place: place[1])]  # the root
        assert arrows(axis) == want
    assert len(circles(panels(figure)[-1], GREEN)) == len(told.selected)
    assert len(circles(panels(figure)[-1], GREY)) == len(told.steps)


@pytest.mark.parametrize("told", SEARCHES)
def test_every_level_explored_has_a_panel_and_all_its_nodes_are_diamonds(
    told: Explanation, drawn: Callable[..., Any]
) -> None:
    shown = panels(drawn(told))
    assert len(shown) == told.plan.depth + 2
    for level, axis in enumerate(shown):
        exploring = [step for step in told.steps if level_of(told.plan, step.node) == level]
        assert len(circles(axis, GREY, "D")) == len(exploring)


@pytest.mark.parametrize("told", SEARCHES)
def test_the_last_panel_has_the_tokens_numbers_and_a_bar_for_every_node_read(
    told: Explanation, drawn: Callable[..., Any]
) -> None:
    """From left to right the tokens have the caller's numbers; a bar spans those of one node and no others."""
    axis = panels(drawn(told))[-1]
    lowest = min(y for _, y in circles(axis, GREEN))
    labels = [text for text in axis.texts if text.get_text() and text.get_position()[1] < lowest]
    tokens = sorted((text.get_position()[0], int(text.get_text())) for text in labels)
    assert tuple(token for _, token in tokens) == told.numbers
    bars = [line.get_xdata() for line in axis.lines if line.get_linestyle() == "-" and line.get_linewidth() == 3]
    spanned = {tuple(token for x, token in tokens if left < x < right) for left, right in bars}
    assert spanned == {read.numbers for read in told.selected}


def test_the_star_is_below_the_leaf_of_the_token_it_names(drawn: Callable[..., Any]) -> None:
    told = budgeted(16, 8)
    for truth in (told.numbers[0], told.numbers[9]):
        for axis in panels(drawn(told, truth=truth)):
            (star,) = (float(line.get_xdata()[0]) for line in axis.lines if line.get_marker() == "*")
            below = {text.get_text(): text.get_position()[0] for text in axis.texts if text.get_position()[1] < -4.1}
            assert below[str(truth) if len(below) > 1 else f"token {truth}"] == star


@pytest.mark.parametrize("told", [*SEARCHES, budgeted(64, 40, 4), search(64, 2, 7)])
def test_captions_and_legends_fit(told: Explanation, drawn: Callable[..., Any]) -> None:
    figure = drawn(told, truth=told.numbers[0])
    boxes = [axis.title.get_window_extent() for axis in panels(figure)]
    assert not any(a.overlaps(b) for number, a in enumerate(boxes) for b in boxes[:number])
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    for box in [*boxes, *(legend.get_window_extent() for legend in legends)]:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width


def test_captions_say_what_was_taken_and_rejected(drawn: Callable[..., Any]) -> None:
    assert [axis.get_title() for axis in panels(drawn(search(8, 2, 1)))] == [
        "Step 0: start at the root",
        "Step 1: 1 taken, 2 rejected",
        "Step 2: 4 taken, 3 rejected",
        "End: leaves 9, 10 read, 4 nodes for 8 tokens",
    ]
    assert [axis.get_title() for axis in panels(drawn(budgeted(64, 40)))][-2:] == [
        "Level 5: 14 nodes taken, 8 nodes rejected",
        "End: 40 nodes read for 64 tokens",
    ]


def test_a_search_of_the_copy_task_is_drawn_with_a_budget(tmp_path: Path) -> None:
    model = make_recipe("copy", n=32, model="tca").make_model()
    assert isinstance(model, ReTreever)
    batch = next(CopyTask(32).test(size=1))
    told = {budget: draw_search(tmp_path / f"{budget}.png", model, batch, budget=budget) for budget in (None, 10)}
    assert [len(search.selected) for search in told.values()] == [5, 10]
    assert all(pixels(file).numel() for file in tmp_path.iterdir())


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
