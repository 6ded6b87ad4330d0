"""The operator's attention: against torch's own, a loop over the selected set, and itself in other batches."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever.errors import InputError
from retreever.ops.search.api import TreeAttention, full_attention, tree_attention
from retreever.tree.aggregate import MeanAggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan
from retreever.tree.selected import selected_nodes

HEADS, WIDTH, QUERIES = 2, 3, 4
EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "200"))
properties = settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
lengths_of_rows = st.lists(st.integers(1, 20), min_size=1, max_size=3)
seeds = st.integers(0, 10_000)
PRECISIONS = [(torch.float32, 1e-6), (torch.float64, 1e-12)]


class Operands(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    plan: TreePlan
    node_mask: Tensor | None

    def attend(self, noise: Tensor | None = None) -> TreeAttention:
        return tree_attention(*self, noise, impl="reference")

    def noise(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(*self.q.shape[:2], self.plan.depth, generator=generator, dtype=torch.float64)

    def differentiable(self) -> Operands:
        return self._replace(**{name: getattr(self, name).clone().requires_grad_() for name in ("q", "keys", "values")})


def on_tree(context: Tensor, branch: int, mask: Tensor | None = None, seed: int = 0) -> Operands:
    """Random queries, and the nodes of a mean tree over `context` (b, n, 2*h*e) as keys and values."""
    plan, nodes, node_mask = build_nodes(context, MeanAggregator(), branch, mask)
    keys, values = nodes.unflatten(-1, (2, HEADS, WIDTH)).unbind(dim=2)
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(len(context), QUERIES, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    return Operands(2 * q.to(context.dtype), keys, values, plan, node_mask)


def scattered(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A context and a mask with lengths[i] real tokens anywhere in row i."""
    generator = torch.Generator().manual_seed(seed)
    n = max(lengths)
    mask = torch.stack([torch.randperm(n, generator=generator) < length for length in lengths])
    return torch.randn(*mask.shape, 2 * HEADS * WIDTH, generator=generator, dtype=torch.float64).to(dtype), mask


def ragged(lengths: list[int], branch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Operands:
    context, mask = scattered(lengths, seed, dtype)
    return on_tree(context, branch, mask, seed)


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keys, values))).transpose(1, 2)


def loop_attention(x: Operands, selected: Tensor) -> Tensor:
    """softmax(q k / sqrt(e)) v over the listed nodes, one query and one head at a time."""
    out = torch.zeros_like(x.q)
    for row, query, head in [(r, m, h) for r in range(len(x.q)) for m in range(QUERIES) for h in range(HEADS)]:
        rows = [node for node in selected[row, query].tolist() if node >= 0]
        scores = torch.stack([x.q[row, query, head] @ x.keys[row, node, head] / WIDTH**0.5 for node in rows])
        weights = (scores - scores.max()).exp()
        terms = [weight * x.values[row, node, head] for weight, node in zip(weights, rows, strict=True)]
        out[row, query, head] = torch.stack(terms).sum(dim=0) / weights.sum()
    return out


def rejected_and_leaves(x: Operands, path: Tensor) -> Tensor:
    """The selected set, node by node on the way up from the leaf block; -1 for padding."""
    plan, mask, table = x.plan, x.node_mask, []
    for row in range(len(path)):
        for end in path[row].tolist():
            nodes = [plan.leaf_offset + end * plan.block + place for place in range(plan.block)]
            for level in range(plan.depth, 0, -1):
                first = plan.offsets[level] + end // plan.branch * plan.branch
                nodes += [first + child for child in range(plan.branch) if child != end % plan.branch]
                end //= plan.branch
            table.append([node if mask is None or bool(mask[row, node]) else -1 for node in nodes])
    return torch.tensor(table).view(*path.shape, -1)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@properties
@given(lengths_of_rows, st.integers(0, 3), seeds, st.sampled_from(PRECISIONS))
def test_one_wide_node_is_plain_cross_attention(
    lengths: list[int], spare: int, seed: int, precision: tuple[torch.dtype, float]
) -> None:
    dtype, tolerance = precision
    context, mask = scattered(lengths, seed, dtype)
    x = on_tree(context, max(2, context.shape[1] + spare), mask, seed)
    out = x.attend()
    for row in range(len(lengths)):
        keys, values = context[row : row + 1, mask[row]].unflatten(-1, (2, HEADS, WIDTH)).unbind(dim=2)
        close(out.output[row : row + 1], sdpa(x.q[row : row + 1], keys, values), tolerance)
    assert not out.path.any() and not out.log_prob.any() and not out.entropy.any()


@properties
@given(lengths_of_rows, st.integers(2, 5), seeds, st.sampled_from([torch.nan, torch.inf, 1e30]), st.booleans())
def test_padding_has_no_influence_and_ragged_rows_are_as_if_alone(
    lengths: list[int], branch: int, seed: int, garbage: float, sampled: bool
) -> None:
    context, mask = scattered(lengths, seed)
    x = on_tree(context, branch, mask, seed)
    noise = x.noise(seed) if sampled else None
    out = x.attend(noise)
    spoiled = on_tree(context.masked_fill(~mask[..., None], garbage), branch, mask, seed).attend(noise)
    assert all(torch.equal(a, b) for a, b in zip(out[:4], spoiled[:4], strict=True))
    for row in range(len(lengths)):
        own = on_tree(context[row : row + 1, mask[row]], branch)._replace(q=x.q[row : row + 1])
        own_noise = None if noise is None else noise[row : row + 1, :, x.plan.depth - own.plan.depth :]
        for batched, alone in zip(out[:4], own.attend(own_noise)[:4], strict=True):
            close(batched[row : row + 1], alone, 1e-6)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("branch", [2, 3, 5])
@pytest.mark.parametrize("lengths", [[1], [2, 1], [7, 3], [20, 11, 6]])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["f32", "f64"])
def test_output_is_attention_over_the_selected_set(
    lengths: list[int], branch: int, sampled: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x = ragged(lengths, branch, dtype=dtype)
    out = x.attend(x.noise() if sampled else None)
    close(out.output, loop_attention(x, rejected_and_leaves(x, out.path)), tolerance)


@pytest.mark.parametrize(("lengths", "branch"), [([9, 5], 2), ([20, 12, 5], 4)])
def test_the_reported_selected_set_is_the_one_attended_to(lengths: list[int], branch: int) -> None:
    x = ragged(lengths, branch)
    path = x.attend(x.noise()).path
    reported, counted = selected_nodes(x.plan, path, x.node_mask), rejected_and_leaves(x, path)
    assert torch.equal(reported.sort(dim=-1).values, counted.sort(dim=-1).values)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("lengths", "branch"), [([5], 2), ([7, 3], 2), ([7, 2], 3), ([3, 2], 4)])
def test_gradients_along_a_frozen_path_are_right(lengths: list[int], branch: int, sampled: bool) -> None:
    x = ragged(lengths, branch).differentiable()
    noise = x.noise() if sampled else None

    def along_path(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = x._replace(q=q, keys=keys, values=values).attend(noise)
        return out.output, out.log_prob, out.entropy

    inputs = (x.q, x.keys, x.values)
    assert torch.autograd.gradcheck(along_path, inputs, eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", [0.0, 1e4, -1e18])
def test_masked_nodes_have_no_weight_and_no_gradient(garbage: float, dtype: torch.dtype) -> None:
    """Also when they would win every comparison: a node of padding alone is not there."""
    clean = ragged([9, 4, 1], 3, dtype=dtype)
    padding = ~clean.node_mask[..., None, None]
    x = clean._replace(keys=clean.keys.masked_fill(padding, garbage), values=clean.values.masked_fill(padding, garbage))
    x, noise = x.differentiable(), clean.noise()
    out = x.attend(noise)
    assert all(torch.equal(a, b) for a, b in zip(out[:4], clean.attend(noise)[:4], strict=True))
    (out.output.square().sum() + out.log_prob.sum() + out.entropy.sum()).backward()
    for nodes in (x.keys, x.values):
        assert bool((nodes.grad[~x.node_mask] == 0).all())
        assert bool(torch.isfinite(nodes.grad).all()) and bool(nodes.grad.any())


def test_neither_slot_in_the_batch_nor_place_among_queries_matters() -> None:
    x = ragged([20, 11, 6, 20], 2, dtype=torch.float32)
    noise, rows, queries = x.noise(), torch.tensor([2, 0, 3, 1]), torch.tensor([3, 1, 0, 2])
    moved = Operands(x.q[rows][:, queries], x.keys[rows], x.values[rows], x.plan, x.node_mask[rows])
    for there, here in zip(moved.attend(noise[rows][:, queries])[:4], x.attend(noise)[:4], strict=True):
        assert torch.equal(there, here[rows][:, queries])


def test_a_query_is_answered_the_same_alone_and_twice() -> None:
    x = ragged([20, 11], 2, dtype=torch.float32)
    noise = x.noise()
    out, again = x.attend(noise), x.attend(noise)
    one = x._replace(q=x.q[:, 1:2]).attend(noise[:, 1:2])
    for batched, alone, repeated in zip(out[:4], one[:4], again[:4], strict=True):
        assert torch.equal(batched[:, 1:2], alone)
        assert torch.equal(batched, repeated)


@pytest.mark.parametrize(
    ("given_", "inner"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_computed_in_float32(given_: torch.dtype, inner: torch.dtype) -> None:
    x = ragged([9, 4], 2, dtype=given_)
    out = x.attend(x.noise())
    assert [part.dtype for part in out[:4]] == [given_, torch.int64, inner, inner]
    assert full_attention(*x).dtype == given_
    exact = Operands(x.q.to(inner), x.keys.to(inner), x.values.to(inner), x.plan, x.node_mask).attend(x.noise())
    assert torch.equal(out.output, exact.output.to(given_))
    assert all(torch.equal(a, b) for a, b in zip(out[1:4], exact[1:4], strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["f32", "f64"])
@pytest.mark.parametrize(("lengths", "branch"), [([1], 2), ([5, 3], 8), ([20, 11, 6], 3)])
def test_full_attention_reads_all_real_leaves(
    lengths: list[int], branch: int, dtype: torch.dtype, tolerance: float
) -> None:
    context, mask = scattered(lengths, dtype=dtype)
    x = on_tree(context, branch, mask)
    for row in range(len(lengths)):
        keys, values = context[row : row + 1, mask[row]].unflatten(-1, (2, HEADS, WIDTH)).unbind(dim=2)
        close(full_attention(*x)[row : row + 1], sdpa(x.q[row : row + 1], keys, values), tolerance)


def test_full_attention_needs_no_mask_on_a_full_tree() -> None:
    context = scattered([8, 8])[0]
    x = on_tree(context, 2)
    assert x.node_mask is None
    keys, values = context.unflatten(-1, (2, HEADS, WIDTH)).unbind(dim=2)
    close(full_attention(*x), sdpa(x.q, keys, values), 1e-12)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", {"q": torch.zeros(2, QUERIES, WIDTH, dtype=torch.float64)}),
        ("q", {"q": torch.zeros(2, QUERIES, HEADS, WIDTH, dtype=torch.int64)}),
        ("keys", {"keys": torch.zeros(2, 5, HEADS, WIDTH, dtype=torch.float64)}),
        ("keys", {"q": torch.zeros(3, QUERIES, HEADS, WIDTH, dtype=torch.float64)}),
        ("keys", {"q": torch.zeros(2, QUERIES, HEADS, WIDTH)}),
        ("values", {"values": torch.zeros(2, 14, HEADS, WIDTH + 1, dtype=torch.float64)}),
        ("plan", {"plan": (8, 2)}),
        ("node_mask", {"node_mask": torch.ones(2, 13, dtype=torch.bool)}),
        ("node_mask", {"node_mask": torch.ones(2, 14)}),
        ("noise", {"noise": torch.zeros(2, QUERIES, 3)}),
        ("noise", {"noise": torch.zeros(2, QUERIES, 2, dtype=torch.int64)}),
        ("impl", {"impl": "fastest"}),
    ],
)
def test_unusable_operands_are_refused_by_name(argument: str, change: dict[str, object]) -> None:
    x = ragged([8, 5], 2)._asdict()
    with pytest.raises(InputError, match=rf"^{argument}: expected"):
        tree_attention(**(x | change))
