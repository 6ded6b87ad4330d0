"""`torch.compile(fullgraph=True)` takes the modules and models whole and changes nothing they compute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from retreever import BNP, CNP, NP, TNPD, Batch, PerceiverIO, ReTreever, TransformerCA, TreeCrossAttention
from retreever.models.retreever import Draws

TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
MASK = torch.arange(9) < torch.tensor([[9], [5]])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def compiled(function: Callable, backend: str = "aot_eager") -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend)


def points() -> Batch:
    parts = (torch.randn(2, n, 1, generator=torch.Generator().manual_seed(n)) for n in (9, 9, 3, 3))
    return Batch(*parts)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def searching(module: TreeCrossAttention) -> Callable[..., object]:
    def search(query: Tensor, context: Tensor, mask: Tensor | None) -> object:
        return module(query, module.build(context, mask))

    return search


def test_tree_cross_attention_compiles_whole() -> None:
    """Build and search in one graph, with padding: output, path, probabilities and selected nodes stay the same."""
    search = searching(TreeCrossAttention(16, 4).eval())
    query, context = torch.randn(2, 3, 16), torch.randn(2, 9, 16)
    eager, fused = search(query, context, MASK), compiled(search)(query, context, MASK)
    assert gap(fused.output, eager.output) <= 1e-6 and gap(fused.log_prob, eager.log_prob) <= 1e-6
    assert torch.equal(fused.path, eager.path) and torch.equal(fused.selected, eager.selected)
    assert fused.tokens == eager.tokens


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA, PerceiverIO])
def test_predict_compiles_whole(kind: type[nn.Module]) -> None:
    model, data = kind(**TINY).eval(), points()
    eager, fused = (predict(data.xc, data.yc, data.xt, MASK) for predict in (model.predict, compiled(model.predict)))
    assert gap(fused.mean, eager.mean) <= 1e-6 and gap(fused.stddev, eager.stddev) <= 1e-6


def test_the_loss_of_retreever_compiles_whole_with_its_gradients() -> None:
    model, data, noise = ReTreever(**TINY), points(), torch.rand(2, 3, 3)
    results = []
    for loss in (model.loss, compiled(model.loss)):
        model.zero_grad()
        parts = loss(data, Draws(noise))
        parts.total.backward()
        results.append([*parts, *(p.grad.clone() for p in model.parameters())])
    assert all(gap(one, two) <= 1e-5 for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [ReTreever, NP, BNP])
def test_losses_that_draw_compile_for_any_sizes(kind: type[nn.Module]) -> None:
    model = kind(**TINY) if kind is ReTreever else kind(dim=16)
    loss = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=True)
    for b, n, m in ((2, 9, 4), (3, 17, 5)):
        x, xt = torch.rand(b, n, 2), torch.rand(b, m, 2)
        one = Batch(x[..., : model.config.dim_x], x[..., :1], xt[..., : model.config.dim_x], xt[..., :1])
        assert loss(one).total.isfinite()


@pytest.mark.parametrize("kind", [TransformerCA, CNP, TNPD])
def test_a_loss_without_a_search_compiles_whole(kind: type[nn.Module]) -> None:
    """Its parts share no memory: what a compiled function returns must not."""
    model, data = kind(dim=16), points()
    loss = compiled(model.loss)(data)
    loss.total.backward()
    assert gap(loss.task, loss.total) == 0 and gap(loss.total, model.loss(data).total) <= 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@torch.no_grad()
def test_inductor_agrees_with_eager() -> None:
    search = searching(TreeCrossAttention(8, 2, aggregator="mean", hidden=0, residual="none").eval())
    query, context = torch.randn(1, 2, 8), torch.randn(1, 4, 8)
    fused = compiled(search, backend="inductor")(query, context, None)
    assert gap(fused.output, search(query, context, None).output) <= 1e-5


@torch.no_grad()
def test_a_first_call_may_be_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which backend runs is remembered between calls; a graph must not depend on that memory."""
    monkeypatch.setattr("retreever.ops.backend._chosen", {})
    module = TreeCrossAttention(8, 2).eval()
    query, tree = torch.randn(1, 2, 8), module.build(torch.randn(1, 9, 8))
    monkeypatch.setattr("retreever.ops.backend._chosen", {})
    first, again = compiled(module), compiled(module)
    assert gap(first(query, tree).output, module(query, tree).output) <= 1e-6
    assert gap(again(query, tree).output, first(query, tree).output) <= 1e-6
