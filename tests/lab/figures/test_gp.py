"""Pictures of GP regression: what a query read is a partition of the context, and every model can be drawn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from retreever import Batch, InputError, PerceiverIO, ReTreever, TransformerCA
from retreever.lab.figures.gp import draw_gp, nodes_read, on_grid, validation_functions
from retreever.tasks.gp import GPTask
from retreever.tree.order import ORDERS

image = pytest.importorskip("matplotlib.image")
TINY: dict[str, Any] = {"dim": 8, "heads": 2, "layers": 1, "hidden": 8}
KINDS = (ReTreever, TransformerCA, PerceiverIO)


def points(n: int, seed: int, mask: torch.Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y, xt = (torch.randn(1, size, 1, generator=generator) for size in (n, n, 3))
    return Batch(x, y, xt, xt, mask)


def size_of(file: Path) -> tuple[int, int]:
    """Height and width, once it has been seen to be a PNG."""
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return image.imread(file).shape[:2]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), branch=st.integers(2, 5), order=st.sampled_from(ORDERS), seed=st.integers(0, 99))
def test_the_nodes_read_partition_the_context(n: int, branch: int, order: str, seed: int) -> None:
    """Every real point is under exactly one of them, as many as the search says it read; masked points under none."""
    mask = torch.rand(1, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[0, seed % n] = True
    model, batch = ReTreever(**TINY, branch=branch, order=order, impl="reference").eval(), points(n, seed, mask)
    read = nodes_read(model, batch, query=seed % 3)
    assert sorted(point for node in read for point in node.points) == mask[0].nonzero().flatten().tolist()
    found = model.search(model.encode(batch.xc, batch.yc, mask), batch.xt)
    assert len(read) == int(found.tokens_read[0, seed % 3]) == len({node.node for node in read})


@pytest.mark.parametrize(("order", "branch"), [("kd", 3), ("ball", 2), ("random", 4), ("given", 2)])
def test_a_node_stands_for_the_points_whose_values_change_it(order: str, branch: int) -> None:
    """In the plane, without an encoder: a point's value reaches the nodes above it and no others."""
    model = ReTreever(**TINY, dim_x=2, encoder="identity", order=order, branch=branch, impl="reference").eval()
    x, y = torch.randn(2, 1, 20, 2, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, y[..., :1], x[:, :3], y[:, :3, :1])
    before = model.encode(batch.xc, batch.yc).keys
    changed = []
    for point in range(20):
        moved = batch.yc.clone()
        moved[0, point] += 1
        changed.append((model.encode(batch.xc, moved).keys != before).flatten(2).any(dim=2)[0])
    for read in nodes_read(model, batch, query=1):
        assert sorted(read.points) == [point for point in range(20) if changed[point][read.node - 1]]


@pytest.mark.parametrize("n", [5, 24, 46])
def test_on_a_line_nodes_cover_intervals_that_do_not_overlap(n: int) -> None:
    batch = points(n, seed=n)
    x, read = batch.xc[0, :, 0], nodes_read(ReTreever(**TINY), batch)
    intervals = sorted((float(x[list(node.points)].min()), float(x[list(node.points)].max())) for node in read)
    assert all(left[1] < right[0] for left, right in pairwise(intervals))
    deepest = max(node.level for node in read)
    assert all(len(node.points) == 1 for node in read if node.level == deepest)


def test_functions_are_those_of_their_seed_and_of_no_training_or_test_stream() -> None:
    task = GPTask(test_batches=20)
    drawn, again, other = (validation_functions(task, seed, 4) for seed in (0, 0, 1))
    assert all(torch.equal(a.batch.yc, b.batch.yc) for a, b in zip(drawn, again, strict=True))
    sizes = [function.batch.xc.shape[1] for function in drawn]
    assert sizes == sorted(sizes)
    first = {float(function.batch.yc[0, 0, 0]) for function in drawn}
    seen = [*task.test(), *(task.sample(16, task.training(seed)) for seed in (0, 1))]
    for batch in [*(function.batch for function in other), *seen]:
        assert not first & set(batch.yc[:, 0, 0].tolist())


def test_a_grid_keeps_the_context_and_the_posterior_goes_through_it() -> None:
    task = GPTask()
    (function,) = validation_functions(task, 0, 1)
    batch = on_grid(function.batch, function.batch.xc[0, :, 0])
    assert batch.xc is function.batch.xc
    exact = task.posterior(batch, function.hyper)
    assert (exact.mean.float() - batch.yc).abs().max() < 0.06  # three standard deviations of the noise


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_is_drawn_and_searches_have_a_strip_more(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind(**TINY).train()
    height, width = size_of(draw_gp(model, GPTask("matern"), tmp_path / "new" / "gp.png", functions=3))
    assert model.training and width == 1680
    assert height == pytest.approx(150 * (2 * (3.5 if kind is ReTreever else 2.7) + 0.4), abs=1)


def test_reading_all_leaves_has_no_strip(tmp_path: Path) -> None:
    file = draw_gp(ReTreever(**TINY, retrieval="full"), GPTask(), tmp_path / "gp.png", functions=1)
    assert size_of(file)[0] == pytest.approx(150 * 3.1, abs=1)


@pytest.mark.parametrize(
    ("settings", "arguments", "named"),
    [({}, {"functions": 0}, "functions"), ({}, {"seed": -1}, "seed"), ({"head": "categorical"}, {}, "model")],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], arguments: dict[str, int], named: str
) -> None:
    with pytest.raises(InputError, match=f"^{named}: expected "):
        draw_gp(ReTreever(**TINY, **settings), GPTask(), tmp_path / "gp.png", **arguments)
    assert list(tmp_path.iterdir()) == []
