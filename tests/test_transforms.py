"""What users of other torch modules try: vmap and Jacobians over queries, second derivatives, compiling once for all n.

Plain torch has all of them; where a kernel cannot, the error names `impl="reference"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from retreever import BackendError, CrossAttention, PerceiverIO, ReTreever, TransformerCA, TreeCrossAttention

TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
MODELS = (ReTreever, TransformerCA, PerceiverIO)


def points(n: int, width: int = 1) -> Tensor:
    return torch.randn(1, n, width, generator=torch.Generator().manual_seed(n))


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-5)


def tree_module(impl: str, dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Tensor], Tensor]:
    """Output of one query (16,), read from a tree of nine tokens, and five queries."""
    torch.manual_seed(0)
    module = TreeCrossAttention(16, 4, impl=impl).eval().to(dtype)
    tree = module.build(points(9, 16).to(dtype))

    def read(query: Tensor, budget: int | None = None) -> Tensor:
        return module(query[None, None], tree, budget=budget).output[0, 0]

    return read, points(5, 16)[0].to(dtype)


@pytest.mark.parametrize("budget", [None, 7])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_vmap_over_queries_equals_one_query_at_a_time(impl: str, budget: int | None) -> None:
    read, queries = tree_module(impl)
    plain = tree_module("reference")[0]
    alone = torch.stack([plain(query, budget) for query in queries])
    mapped = torch.func.vmap(lambda query: read(query, budget))(queries)
    assert near(mapped, alone)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_hessians_equal_finite_differences_of_jacobians(impl: str) -> None:
    read, queries = tree_module(impl, torch.float64)
    jacobian = torch.func.jacrev(lambda query: read(query).sum())
    step = 1e-6 * queries[1] / queries[1].norm()
    difference = (jacobian(queries[0] + step) - jacobian(queries[0] - step)) / 2
    product = torch.func.hessian(lambda query: read(query).sum())(queries[0]) @ step
    assert torch.allclose(product, difference, rtol=1e-4, atol=1e-12) and product.abs().max() > 1e-9


@pytest.mark.parametrize("kind", MODELS)
def test_models_answer_under_vmap(kind: type) -> None:
    torch.manual_seed(0)
    model = kind(**TINY).eval()
    memory, targets = model.encode(points(9), points(9)), points(4)
    alone = model.answer(memory, targets).mean[0]
    mapped = torch.func.vmap(lambda x: model.answer(memory, x[None, None]).mean[0, 0])(targets[0])
    assert near(mapped, alone)


def test_contexts_may_be_mapped_too() -> None:
    torch.manual_seed(0)
    contexts, query = points(27, 16).reshape(3, 9, 16), points(2, 16)
    for module in (TreeCrossAttention(16, 4).eval(), CrossAttention(16, 4)):
        batch = module(query.expand(3, -1, -1), module.build(contexts)).output
        mapped = torch.func.vmap(lambda context, m=module: m(query, m.build(context[None])).output[0])(contexts)
        assert near(mapped, batch)


def test_a_kernel_named_by_the_user_says_what_can_be_transformed() -> None:
    read, queries = tree_module("numba")
    for transform in (torch.func.vmap(read), torch.func.vmap(torch.func.jacrev(read))):
        with pytest.raises(BackendError, match=r"impl='numba' cannot .* impl='reference' can"):
            transform(queries)


def test_predictions_of_the_reference_can_be_differentiated_twice() -> None:
    """With respect to where they are asked for; kernels refuse, and name the reference."""
    torch.manual_seed(0)
    model, x = ReTreever(**TINY, impl="reference").eval(), points(4).requires_grad_()
    mean = model.predict(points(9), points(9), x).mean
    (first,) = torch.autograd.grad(mean.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all() and second.abs().min() > 0


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many graphs were compiled since the test began."""
    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


@torch.no_grad()
def test_a_dynamic_graph_serves_all_contexts_of_one_depth(graphs: Callable[[], int]) -> None:
    """One for sizes that fill the leaves and one for all others: 17 to 32 tokens have trees of the same depth."""
    torch.manual_seed(0)
    model = ReTreever(**TINY | {"layers": 0}, encoder="identity", aggregator="mean", impl="reference").eval()
    predict = torch.compile(lambda *data: model.predict(*data).mean, dynamic=True, backend="eager", fullgraph=True)
    for n in (20, 27, 32, 31):
        x, y, target = points(n), points(n) ** 2, points(5)
        assert near(predict(x, y, target), model.predict(x, y, target).mean)
    assert graphs() <= 2


@torch.no_grad()
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_dynamic_graph_reads_budgets_too(graphs: Callable[[], int], impl: str) -> None:
    torch.manual_seed(0)
    module = TreeCrossAttention(16, 2, impl=impl).eval()

    def read(query: Tensor, context: Tensor) -> Tensor:
        return module(query, module.build(context), budget=12).output

    compiled = torch.compile(read, dynamic=True, backend="eager", fullgraph=True)
    for n in (20, 27, 32, 31):
        assert near(compiled(points(5, 16), points(n, 16)), read(points(5, 16), points(n, 16)))
    assert graphs() <= 2
