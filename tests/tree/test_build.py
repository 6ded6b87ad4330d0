"""Building a tree: every node against a plain recursion, padding without influence, gradients where they belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retreever.attention import TreeCrossAttention
from retreever.errors import InputError
from retreever.tree.aggregate import MeanAggregator, TransformerAggregator, make_aggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan

NAMES = ["transformer", "mean"]
DIM = 4
properties = settings(max_examples=150, derandomize=True, deadline=None)
lengths_of_rows = st.lists(st.integers(1, 18), min_size=1, max_size=3)


def aggregator_of(name: str, dtype: torch.dtype = torch.float64, residual: str = "pre") -> nn.Module:
    torch.manual_seed(0)
    return MeanAggregator() if name == "mean" else TransformerAggregator(DIM, 2, 8, residual).to(dtype)


def tokens(b: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(b, n, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scattered_mask(lengths: list[int], seed: int = 0) -> Tensor:
    """Row i has lengths[i] real tokens, anywhere among max(lengths)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(max(lengths), generator=generator)[:length]] = True
    return mask


def recursive_nodes(row: Tensor, branch: int, aggregator: nn.Module) -> dict[int, Tensor]:
    """Nodes of one context by flat row, one aggregator call per node, without any padding."""
    n, plan, nodes = len(row), TreePlan(len(row), branch), {}

    def visit(level: int, node: int) -> Tensor:
        if level == plan.depth:
            start, stop = node * n // plan.blocks, (node + 1) * n // plan.blocks
            children = row[start:stop]
            nodes.update({plan.leaf_offset + node * plan.block + place: leaf for place, leaf in enumerate(children)})
        else:
            children = torch.stack([visit(level + 1, node * branch + child) for child in range(branch)])
        if level == 0:
            return children[0]  # nobody reads the root
        summary = aggregator(children[None], None)[0]
        nodes[plan.offsets[level] + node] = summary
        return summary

    visit(0, 0)
    return nodes


def rows_in_batch(own: TreePlan, plan: TreePlan) -> list[int]:
    """Where the nodes of a shorter context's own tree lie in the batch's: its leftmost subtree of the same depth."""
    lift = plan.depth - own.depth
    inner = [
        plan.offsets[level + lift] + node for level in range(1, own.depth + 1) for node in range(own.branch**level)
    ]
    leaves = [plan.leaf_offset + j * plan.block + place for j in range(own.blocks) for place in range(own.block)]
    return inner + leaves


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["f32", "f64"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("branch", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12, 16, 26])
def test_nodes_equal_a_plain_recursion(n: int, branch: int, name: str, dtype: torch.dtype, tolerance: float) -> None:
    aggregator, context = aggregator_of(name, dtype), tokens(2, n, dtype)
    plan, nodes, mask = build_nodes(context, aggregator, branch)
    assert (plan, nodes.shape, nodes.dtype) == (TreePlan(n, branch), (2, plan.nodes, DIM), dtype)
    for row in range(2):
        expected = recursive_nodes(context[row], branch, aggregator)
        real = list(range(plan.nodes)) if mask is None else mask[row].nonzero()[:, 0].tolist()
        assert real == sorted(expected)  # the mask says exactly which nodes the recursion has
        torch.testing.assert_close(nodes[row, real], torch.stack([expected[r] for r in real]), rtol=0, atol=tolerance)
    assert mask is None or bool((nodes[~mask] == 0).all())


@pytest.mark.parametrize("residual", ["pre", "normalised"])
@properties
@given(lengths_of_rows, st.integers(2, 5), st.integers(0, 10_000))
def test_a_ragged_batch_equals_its_rows_one_by_one(residual: str, lengths: list[int], branch: int, seed: int) -> None:
    aggregator, mask = aggregator_of("transformer", residual=residual), scattered_mask(lengths, seed)
    context = tokens(*mask.shape, seed=seed)
    plan, nodes, real = build_nodes(context, aggregator, branch, mask)
    for row in range(len(lengths)):
        own, own_nodes, own_real = build_nodes(context[row, mask[row]][None], aggregator, branch)
        own_real = torch.ones(1, own.nodes, dtype=torch.bool) if own_real is None else own_real
        # A block of the batch may be narrower than a slot the lone tree pads: only real nodes need a place.
        places = torch.tensor(rows_in_batch(own, plan))[own_real[0]]
        torch.testing.assert_close(nodes[row, places], own_nodes[0, own_real[0]], rtol=0, atol=1e-12)
        assert bool(real[row, places].all())
        assert int(real[row].sum()) == len(places) + plan.depth - own.depth  # plus the chain above the subtree


@properties
@given(lengths_of_rows, st.integers(2, 5), st.sampled_from(NAMES), st.sampled_from([torch.nan, torch.inf, -1e30]))
def test_what_stands_in_masked_tokens_changes_nothing(
    lengths: list[int], branch: int, name: str, garbage: float
) -> None:
    aggregator, mask = aggregator_of(name), scattered_mask(lengths)
    context = tokens(*mask.shape)
    clean = build_nodes(context, aggregator, branch, mask)[1]
    dirty = build_nodes(context.masked_fill(~mask[..., None], garbage), aggregator, branch, mask)[1]
    assert torch.equal(clean, dirty)


@properties
@given(lengths_of_rows, st.integers(2, 5), st.sampled_from(NAMES))
def test_a_node_is_real_when_a_token_below_it_is_and_otherwise_zero(lengths: list[int], branch: int, name: str) -> None:
    mask = scattered_mask(lengths)
    plan, nodes, real = build_nodes(tokens(*mask.shape), aggregator_of(name), branch, mask)
    leaves = real[:, plan.leaf_offset :]
    for level in range(1, plan.depth + 1):
        below = leaves.reshape(len(lengths), branch**level, -1).any(dim=2)
        assert torch.equal(real[:, plan.offsets[level] : plan.offsets[level + 1]], below)
    assert leaves.sum(dim=1).tolist() == lengths
    assert bool((nodes[~real] == 0).all())


@pytest.mark.parametrize("lengths", [None, [5, 3]], ids=["equal", "ragged"])
def test_gradients_through_the_tree_are_right(lengths: list[int] | None) -> None:
    mask = None if lengths is None else scattered_mask(lengths)
    aggregator, context = aggregator_of("transformer"), tokens(2, 5).requires_grad_()
    weights = [aggregator.layer.to_kv.weight, aggregator.layer.feed_forward.up.bias]
    assert torch.autograd.gradcheck(lambda c, *_: build_nodes(c, aggregator, 2, mask)[1], (context, *weights))


@pytest.mark.parametrize("detach", [False, True])
def test_detach_cuts_the_gradient_between_levels(detach: bool) -> None:
    """Level 1 reaches every leaf, or none; the leaves' own level always does."""
    context = tokens(1, 8).requires_grad_()
    plan, nodes, _ = build_nodes(context, aggregator_of("mean"), detach=detach)
    assert plan.depth == 2
    top = torch.autograd.grad(nodes[:, 0].sum(), context, retain_graph=True)[0]
    assert torch.equal(top[0, :, 0] != 0, torch.tensor([not detach] * 4 + [False] * 4))
    leaves = torch.autograd.grad(nodes[:, plan.leaf_offset :].sum(), context)[0]
    assert bool((leaves == 1).all())


def test_a_detached_tree_still_trains_its_aggregator_on_every_level() -> None:
    aggregator = aggregator_of("transformer")
    plan, nodes, _ = build_nodes(tokens(1, 8), aggregator, detach=True)
    for level in range(1, plan.depth + 1):
        rows = nodes[:, plan.offsets[level] : plan.offsets[level + 1]]
        gradient = torch.autograd.grad(rows.square().sum(), aggregator.layer.to_kv.weight, retain_graph=True)[0]
        assert bool((gradient != 0).any())


def test_masked_tokens_get_no_gradient_even_when_they_are_nan() -> None:
    mask = scattered_mask([6, 2])
    context = tokens(2, 6).masked_fill(~mask[..., None], float("nan")).requires_grad_()
    build_nodes(context, aggregator_of("transformer"), 2, mask)[1].square().sum().backward()
    assert bool((context.grad[~mask] == 0).all())
    assert bool((context.grad[mask] != 0).any(dim=-1).all())


def test_a_full_tree_needs_no_mask_and_keeps_its_tokens() -> None:
    context = tokens(2, 8)
    plan, nodes, mask = build_nodes(context, MeanAggregator(), 2)
    assert mask is None
    assert torch.equal(nodes[:, plan.leaf_offset :], context)


def test_any_module_can_aggregate_and_is_called_once_per_level() -> None:
    class Largest(nn.Module):
        calls = 0

        def forward(self, children: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            return children.amax(dim=1)

    largest = Largest()
    assert make_aggregator(largest, DIM, 2, 8, "pre", 0.0) is largest
    context = tokens(1, 16)
    plan, nodes, _ = build_nodes(context, largest, 2)
    assert largest.calls == plan.depth == 3
    assert torch.equal(nodes[0, 1], context[0, 8:].amax(dim=0))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_real_children_is_exactly_zero(name: str) -> None:
    children, mask = tokens(3, 4), torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])
    children.requires_grad_()
    out = aggregator_of(name)(children, mask)
    assert bool((out[1] == 0).all()) and bool((out[[0, 2]] != 0).all())
    out.square().sum().backward()
    assert bool((children.grad[~mask] == 0).all()) and bool(torch.isfinite(children.grad).all())


@pytest.mark.parametrize("name", NAMES)
def test_aggregators_do_not_see_the_order_of_children_nor_padding_among_them(name: str) -> None:
    aggregator, children = aggregator_of(name), tokens(2, 4)
    expected = aggregator(children, None)
    torch.testing.assert_close(aggregator(children.flip(1), None), expected)
    padded = torch.cat([children[:, :1], 1e6 * tokens(2, 2, seed=9), children[:, 1:]], dim=1)
    mask = torch.tensor([[True, False, False, True, True, True]]).expand(2, -1)
    torch.testing.assert_close(aggregator(padded, mask), expected)


def test_the_aggregator_is_chosen_by_name() -> None:
    """A tree of means is built by sums and has no aggregator."""
    assert make_aggregator("mean", DIM, 2, 8, "pre", 0.0) is None
    assert isinstance(make_aggregator("transformer", DIM, 2, 8, "pre", 0.0), TransformerAggregator)
    with pytest.raises(InputError, match=r"^aggregator: expected one of transformer, mean"):
        make_aggregator("median", DIM, 2, 8, "pre", 0.0)


@pytest.mark.parametrize(
    ("argument", "context", "mask"),
    [
        ("context", torch.zeros(1, 0, DIM), None),
        ("context", torch.zeros(1, 0, DIM), torch.zeros(1, 0, dtype=torch.bool)),
        ("mask", torch.zeros(2, 3, DIM), torch.tensor([[True] * 3, [False] * 3])),
        ("mask", torch.zeros(2, 3, DIM), torch.ones(2, 3)),
        ("mask", torch.zeros(2, 3, DIM), torch.ones(2, 4, dtype=torch.bool)),
        ("context", torch.zeros(3, DIM), None),
        ("context", torch.zeros(1, 3, DIM, dtype=torch.int64), None),
        ("context", torch.full((1, 3, DIM), float("nan")), None),
        ("context", torch.full((1, 3, DIM), float("inf")), torch.tensor([[True, False, False]])),
    ],
)
def test_unusable_contexts_are_refused_by_name(argument: str, context: Tensor, mask: Tensor | None) -> None:
    """At the border: `TreeCrossAttention.build`; `build_nodes` trusts its callers."""
    with pytest.raises(InputError, match=rf"^{argument}: expected"):
        TreeCrossAttention(DIM, 2, aggregator="mean").build(context, mask)
