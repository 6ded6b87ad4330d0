"""A tree that grew equals the tree built at once: any changes, any aggregator, every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retreever import InputError, Tree, TreeCrossAttention, leaf_order
from retreever.ops.backend import Impl, interpreting, unavailable

pytest.importorskip("numba")
PARTS = ("nodes", "keys", "values", "log_count", "counted")
SETTINGS: list[dict[str, Any]] = [{}, {"aggregator": "mean"}, {"aggregator": "mean", "log_count": True}]
# Ways through the kernels of a GPU: any branch, both residuals, with and without log counts.
WAYS: list[dict[str, Any]] = [
    *SETTINGS,
    {"log_count": True},
    {"log_count": True, "residual": "normalised"},
    {"branch": 3},
    {"branch": 3, "aggregator": "mean", "log_count": True},
]
HERE: list[Impl] = ["numba", "reference"]
if interpreting() and unavailable("triton", "cpu", torch.float32) is None:
    HERE.append("triton")
interpreted = pytest.mark.skipif("triton" not in HERE, reason="needs Triton's interpreter")


def module_of(impl: Impl = "auto", dim: int = 16, **options: Any) -> TreeCrossAttention:
    torch.manual_seed(0)
    module = TreeCrossAttention(dim, 2, impl=impl, **options).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def assert_same(grown: Tree, built: Tree, tolerance: float = 1e-5) -> None:
    """All real nodes, all masks and counts; a grown tree may have more room, and then a deeper tree is compared."""
    assert grown.plan == built.plan
    assert grown.mask is not None and torch.equal(grown.mask, built.mask) and torch.equal(grown.count, built.count)
    for name in PARTS:
        ours, theirs = getattr(grown, name), getattr(built, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.allclose(ours[grown.mask], theirs[grown.mask], atol=tolerance), name


class Story:
    """Changes of a tree, and the tokens that a tree built at once would have."""

    def __init__(self, module: TreeCrossAttention, rows: int, first: int) -> None:
        self.module, self.rows = module, rows
        self.tokens, self.real = self.draw(first), torch.ones(rows, first, dtype=torch.bool)
        self.tree = module.build(self.tokens, capacity=1)

    def draw(self, count: int) -> Tensor:
        return torch.randn(self.rows, count, self.module.block.kdim)

    def built(self) -> Tree:
        return self.module.build(self.tokens, self.real, capacity=self.tree.plan.n)

    def tell(self, kind: str, amount: int, place: float, in_place: bool) -> None:
        """One change; `place` in [0, 1) says where."""
        if kind == "append":
            new = self.draw(amount)
            self.tokens = torch.cat([self.tokens, new], dim=1)
            self.real = torch.cat([self.real, torch.ones(self.rows, amount, dtype=torch.bool)], dim=1)
            self.tree = self.module.append(self.tree, new, in_place=in_place)
            return
        n = self.tokens.shape[1]
        start = int(place * n)
        index = torch.arange(start, min(n, start + amount)).flip(0)
        if kind == "replace":
            new = self.draw(len(index))
            self.tokens, self.real = self.tokens.clone(), self.real.clone()
            self.tokens[:, index], self.real[:, index] = new, True
            self.tree = self.module.replace(self.tree, index, new, in_place=in_place)
        elif self.real.sum(dim=1).min() > len(index):
            self.real = self.real.clone()
            self.real[:, index] = False
            self.tree = self.module.evict(self.tree, index, in_place=in_place)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "replace", "evict"]),
        st.integers(1, 5),
        st.floats(0, 0.99),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=20, deadline=None)
@given(CHANGES, st.integers(1, 6), st.integers(2, 4), st.sampled_from(SETTINGS), st.sampled_from(HERE))
def test_any_changes_give_the_tree_built_at_once(
    changes: list[tuple[str, int, float, bool]], first: int, branch: int, options: dict[str, Any], impl: Impl
) -> None:
    """Nodes, keys, values and masks; the same paths and outputs, alone and under a budget."""
    module = module_of(impl, branch=branch, **options)
    with torch.no_grad():
        story = Story(module, 2, first)
        for change in changes:
            story.tell(*change)
        built = story.built()
        assert_same(story.tree, built)
        query = torch.randn(2, 3, 16)
        for budget in (None, 7):
            ours, theirs = (module(query, tree, budget=budget) for tree in (story.tree, built))
            assert torch.equal(ours.path, theirs.path) and torch.equal(ours.selected, theirs.selected)
            assert torch.allclose(ours.output, theirs.output, atol=1e-5)


@interpreted
@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("options", WAYS)
def test_the_triton_kernels_give_the_same_tree(
    options: dict[str, Any], registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of pairs, where it applies, and by the one of all branches."""
    pairs = pytest.importorskip("retreever.ops.aggregate.pairs_triton")
    if not registers and ("branch" in options or "aggregator" in options):
        pytest.skip("the same kernel as with registers")
    monkeypatch.setattr(pairs, "ENABLED", registers)
    module, plain = (module_of(impl, 32, **options) for impl in ("triton", "reference"))
    with torch.no_grad():
        story = Story(module, 2, 3)
        for kind, amount, place in [
            ("append", 2, 0.0),
            ("append", 1, 0.0),
            ("evict", 1, 0.4),
            ("append", 1, 0.0),
            ("replace", 1, 0.2),
            ("evict", 1, 0.9),
            ("replace", 1, 0.4),
        ]:
            story.tell(kind, amount, place, in_place=place == 0)
        built = plain.build(story.tokens, story.real, capacity=story.tree.plan.n)
        assert not torch.equal(story.tree.keys, built.keys)  # the kernels ran: they round differently
        assert_same(story.tree, built)
        query = torch.randn(2, 3, 32)
        assert torch.equal(module(query, story.tree).path, plain(query, built).path)


class Operations(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = "empty" in func.__name__
        self.count += not (func.is_view or allocates)
        return func(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize("options", [way for way in WAYS if "residual" not in way])  # keys of a norm, by the kernel
def test_an_append_is_a_few_launches(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs microseconds on a GPU: two kernels and the new length, whatever the depth of the tree."""
    launching = pytest.importorskip("retreever.ops.launching_triton")
    module = module_of("triton", 32, **options)
    token, launches = torch.randn(1, 1, 32), []
    with torch.inference_mode():
        module.impl = "reference"
        tree = module.build(torch.randn(1, 40, 32), capacity=81)
        module.impl = "triton"
        monkeypatch.setattr(launching.Launcher, "__call__", lambda *args, **_: launches.append(args))
        monkeypatch.setattr("retreever.growing_inputs.check_finite", lambda *_: None)  # which CUDA tensors are spared
        with Operations() as operations:
            module.append(tree, token, in_place=True)
    assert len(launches) == 2 and operations.count == 1


@pytest.mark.parametrize("options", SETTINGS)
def test_the_old_tree_stays_as_it_was(options: dict[str, Any]) -> None:
    module, tokens = module_of(**options), torch.randn(2, 9, 16)
    with torch.no_grad():
        tree = module.build(tokens[:, :7], capacity=16)
        before = tree.clone()
        module.append(tree, tokens[:, 7:])
        module.replace(tree, 3, tokens[:, :1])
        module.evict(tree, 3)
        assert_same(tree, before, 0)
        grown = module.append(tree, tokens[:, 7:], in_place=True)
        assert grown.keys.data_ptr() == tree.keys.data_ptr()
        assert_same(grown, module.build(tokens, capacity=16))


def test_rows_grow_by_different_numbers_of_tokens() -> None:
    """A row of a ragged batch is the tree of that row alone."""
    module = module_of()
    tokens, more = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    more_mask = torch.tensor([[False, True, False, False], [True, True, False, True]])
    more[~more_mask] = torch.nan
    with torch.no_grad():
        tree = module.append(module.build(tokens, mask, capacity=1), more, more_mask)
        query = torch.randn(2, 6, 16)
        found = module(query, tree)
        for row in range(2):
            alone = torch.cat([tokens[row, mask[row]], more[row, more_mask[row]]])[None]
            expected = module(query[row : row + 1], module.build(alone, capacity=1))
            assert torch.allclose(found.output[row], expected.output[0], atol=1e-5)
            assert torch.equal(found.tokens_read[row], expected.tokens_read[0])
    assert tree.length is not None and tree.length.tolist() == [6, 6] and tree.longest == 6


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("step", [1, 3, 13])
def test_a_sliding_window_holds_the_last_tokens(options: dict[str, Any], step: int) -> None:
    module, window = module_of(**options), 10
    tokens = torch.randn(2, 41, 16)
    with torch.no_grad():
        tree = module.build(tokens[:, :2], capacity=window)
        for start in range(2, 41, step):
            tree = module.append(tree, tokens[:, start : start + step], window=window, in_place=True)
        last = torch.arange(31, 41)
        ring = tokens[:, last[(last % window).argsort()]]
        assert_same(tree, module.build(ring, capacity=16))
    assert tree.tokens == 16 or tree.plan.n == 16


@pytest.mark.parametrize("options", SETTINGS)
def test_gradients_reach_appended_tokens(options: dict[str, Any]) -> None:
    """They are those of the tree built at once, where parents of several new tokens are computed once."""
    module = module_of("reference", **options).double()
    tokens, new = torch.randn(2, 3, 16).double().requires_grad_(), torch.randn(2, 6, 16).double().requires_grad_()
    query = torch.randn(2, 4, 16).double()

    def gradients(tree: Tree) -> tuple[Tensor, ...]:
        found = module(query, tree, leaves=True)
        assert found.leaves is not None
        total = found.output.square().sum() + found.log_prob.sum() + found.leaves.sum()
        return torch.autograd.grad(total, (tokens, new, *module.parameters()), allow_unused=True)

    tree = module.append(module.build(tokens, capacity=1), new[:, :1])
    tree = module.append(module.append(tree, new[:, 1:5]), new[:, 5:])
    built = module.build(torch.cat([tokens, new], dim=1), capacity=1)
    for ours, theirs in zip(gradients(tree), gradients(built), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-9)


def test_doubling_computes_one_way_only() -> None:
    """A full tree becomes a subtree by copying rows: only the nodes above one old and one new token are computed."""
    seen: list[int] = []

    class Counting(torch.nn.Module):
        def forward(self, children: Tensor, mask: Tensor | None = None) -> Tensor:
            seen.append(len(children))
            return children.mean(dim=1)

    module = TreeCrossAttention(16, 2, aggregator=Counting()).eval()
    with torch.no_grad():
        tree = module.build(torch.randn(1, 256, 16), capacity=1)
        seen.clear()
        module.append(tree, torch.randn(1, 1, 16))
    assert sum(seen) == 2 * 8 and max(seen) == 1


@pytest.mark.parametrize("options", [*SETTINGS, {"order": "keys"}, {"aggregator": "mean", "order": "keys"}])
@pytest.mark.parametrize("budget", [None, 12, 100])
def test_a_tree_beside_is_read_too(options: dict[str, Any], budget: int | None) -> None:
    """Attention to the union of what both trees read; with a budget of all tokens, to all tokens."""
    module = module_of(**options)
    tokens, query = torch.randn(2, 30, 16), torch.randn(2, 4, 16)
    with torch.no_grad():
        tree = module.append(module.build(tokens[:, :27]), tokens[:, 27:28])
        tree = module.append(tree, tokens[:, 28:])
        found = module(query, tree, budget=budget)
        assert tree.tokens == 30 and found.beside is not None
        folded = module.fold(tree)
        assert folded.beside is None and folded.tokens == 30
        if budget == 100:
            assert torch.allclose(found.output, module(query, folded, budget=100).output, atol=1e-5)
            assert torch.equal(found.tokens_read, torch.full((2, 4), 30))
        module.retrieval = "full"
        everything = module(query, folded).output
        assert torch.allclose(module(query, tree).output, everything, atol=1e-5)
        assert torch.allclose(everything, module(query, module.build(tokens)).output, atol=1e-5)


def test_folding_in_a_spatial_order_gives_the_tree_built_at_once() -> None:
    module, x, tokens = module_of(), torch.rand(2, 40, 2), torch.randn(2, 40, 16)
    rows = torch.arange(2)[:, None]
    with torch.no_grad():
        first = leaf_order("kd", x[:, :33])
        tree = replace(module.build(tokens[rows, first]), order=first)
        for start in range(33, 40):
            tree = module.append(tree, tokens[:, start : start + 1], in_place=True)
        assert tree.beside_share == 7 / 33
        order = leaf_order("kd", x)
        folded, built = module.fold(tree, order), module.build(tokens[rows, order])
    assert torch.allclose(folded.keys, built.keys, atol=1e-6) and torch.equal(folded.order, order)  # type: ignore[arg-type]


def test_trees_sorted_by_keys_fold_themselves() -> None:
    module, tokens = module_of(aggregator="mean", order="keys", log_count=True), torch.randn(1, 60, 16)
    with torch.no_grad():
        tree = module.build(tokens[:, :40])
        shares = []
        for start in range(40, 60):
            tree = module.append(tree, tokens[:, start : start + 1], in_place=True)
            shares.append(tree.beside_share)
        assert max(shares) <= 1 / 8 and shares.count(0) == 3
        query = torch.randn(1, 5, 16)
        ours, theirs = (module(query, t, budget=99).output for t in (tree, module.build(tokens)))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_converted_attention_grows() -> None:
    """A tree of means over all its tokens is the attention itself, whatever was appended."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    module = TreeCrossAttention.from_multihead(attention, order="given", budget=1000)
    tokens, query = torch.randn(1, 50, 16), torch.randn(1, 3, 16)
    with torch.no_grad():
        tree = module.build(tokens[:, :10], capacity=10)
        for start in range(10, 50):
            tree = module.append(tree, tokens[:, start : start + 1], in_place=True)
        assert torch.allclose(module(query, tree).output, attention(query, tokens, tokens)[0], atol=1e-5)


def test_wrong_changes_are_refused_in_one_line() -> None:
    module, token = module_of(), torch.randn(1, 1, 16)
    with torch.no_grad():
        fixed, tree = module.build(token.expand(1, 5, 16)), module.build(token.expand(1, 2, 16), capacity=1)
        calls: list[tuple[str, Any]] = [
            ("tokens: expected shape", lambda: module.append(tree, torch.randn(1, 1, 8))),
            ("tokens: expected finite", lambda: module.append(tree, token * torch.nan)),
            ("tree: expected a Tree", lambda: module.append(token, token)),
            ("tree: expected one that grows", lambda: module.evict(fixed, 0)),
            ("index: expected slots from 0 to 1", lambda: module.evict(tree, 2)),
            ("index: expected every slot once", lambda: module.evict(tree, torch.tensor([1, 1]))),
            ("index: expected slots that leave a token", lambda: module.evict(tree, torch.tensor([0, 1]))),
            ("index: expected shape", lambda: module.replace(tree, torch.tensor([0, 1]), token)),
            ("window: expected None", lambda: module.append(fixed, token, window=3)),
            ("capacity: expected None", lambda: module_of(order="keys").build(token, capacity=4)),
            ("capacity: expected an int >= 1", lambda: module.build(token, capacity=0)),
        ]
        for message, call in calls:
            with pytest.raises(InputError, match=message):
                call()
    with pytest.raises(InputError, match="in_place: expected False where gradients"):
        module.append(tree, token, in_place=True)


def cuda_module(**options: Any) -> tuple[TreeCrossAttention, TreeCrossAttention]:
    plain = module_of("reference", 64, **options)
    fused = module_of("auto", 64, **options).cuda()
    return fused, plain


@pytest.mark.gpu
@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("options", WAYS)
def test_growing_on_a_gpu_equals_the_cpu(
    options: dict[str, Any], registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retreever.ops.aggregate.pairs_triton.ENABLED", registers)
    fused, plain = cuda_module(**options)
    with torch.inference_mode():
        story = Story(plain, 2, 5)
        tree = story.tree.to("cuda")
        tree = replace(tree, stamp=None)
        for start in range(40):
            new = story.draw(1 + start % 3)
            story.tree = plain.append(story.tree, new)
            tree = fused.append(tree, new.cuda(), in_place=start % 2 == 0)
        tree, story.tree = fused.evict(tree, 7), plain.evict(story.tree, 7)
        new = story.draw(1)
        tree, story.tree = fused.replace(tree, 20, new.cuda()), plain.replace(story.tree, 20, new)
        assert_same(tree.to("cpu"), story.tree, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", WAYS)
def test_growing_in_half_precision_errs_no_more_than_plain_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Against float64, with the same weights and tokens."""
    fused, plain = (module_of(impl, 64, **options).to("cuda", dtype) for impl in ("auto", "reference"))
    exact = module_of("reference", 64, **options).to("cuda", dtype).double()
    tokens = torch.randn(1, 40, 64, device="cuda", dtype=dtype)
    with torch.inference_mode():
        ours, theirs = (module.build(tokens[:, :5], capacity=64) for module in (fused, plain))
        for place in range(5, 40):
            ours = fused.append(ours, tokens[:, place : place + 1], in_place=True)
            theirs = plain.append(theirs, tokens[:, place : place + 1], in_place=True)
        wanted = exact.build(tokens.double(), capacity=64)
    for name in ("keys", "values"):
        true = getattr(wanted, name)[wanted.mask]
        errors = [(getattr(tree, name)[wanted.mask].double() - true).abs().max() for tree in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("options", WAYS)
def test_an_append_is_captured_in_a_cuda_graph(options: dict[str, Any]) -> None:
    """Every replay appends another token, at the place where the tree is then."""
    fused, _ = cuda_module(**options)
    with torch.inference_mode():
        tokens = torch.randn(1, 20, 64, device="cuda")
        tree = fused.build(tokens[:, :4], capacity=64)
        token = tokens[:, 4:5].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tree = fused.append(tree, token, in_place=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        token.copy_(tokens[:, 5:6])
        with torch.cuda.graph(graph):
            tree = fused.append(tree, token, in_place=True)
        for place in range(5, 20):
            token.copy_(tokens[:, place : place + 1])
            graph.replay()
        assert_same(tree, fused.build(tokens, capacity=64), 1e-4)
