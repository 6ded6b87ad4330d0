"""Reading budgets: what is read covers every token once, from one path to all tokens; gradients, and parts merged."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import InputError, TreeCrossAttention, TreePlan, tree_attention
from retreever.ops.frontier.api import Part, merge_parts
from retreever.ops.search.api import TreeAttention
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import search_reference
from retreever.tree.means import log_counts, mean_tree
from retreever.tree.selected import selected_nodes

HEADS, WIDTH, QUERIES = 2, 3, 4
EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "200"))
properties = settings(max_examples=EXAMPLES // 5, derandomize=True, deadline=None)
fewer = settings(properties, max_examples=EXAMPLES // 10)
lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=3)
branches, budgets, seeds = st.integers(2, 6), st.integers(1, 45), st.integers(0, 10_000)
PRECISIONS = [(torch.float32, 1e-6), (torch.float64, 1e-12)]


class Operands(NamedTuple):
    """Queries and a tree of means; `tokens` are the keys and values it was built over, `mask` says which are real."""

    q: Tensor
    keys: Tensor
    values: Tensor
    plan: TreePlan
    node_mask: Tensor | None
    tokens: tuple[Tensor, Tensor]
    mask: Tensor

    @property
    def real(self) -> Tensor:
        """Which leaf slots hold a token."""
        if self.node_mask is None:
            return torch.ones(len(self.q), self.plan.leaves, dtype=torch.bool)
        return self.node_mask[:, self.plan.leaf_offset :]

    def attend(self, budget: int | None, noise: Tensor | None = None, **more: Any) -> TreeAttention:
        return tree_attention(*self[:5], noise, impl="reference", budget=budget, **more)

    def noise(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(*self.q.shape[:2], self.plan.depth, generator=generator, dtype=torch.float64)

    def counts(self) -> Tensor:
        return log_counts(self.plan, self.node_mask, self.keys)

    def alone(self, row: int, masked: bool = False) -> Operands:
        """One row of a ragged batch as a context of its own."""
        keys, values = (part[row : row + 1, self.mask[row]] for part in self.tokens)
        mask = torch.ones(keys.shape[:2], dtype=torch.bool)
        plan, *nodes, node_mask = mean_tree(keys, values, self.plan.branch, mask if masked else None)
        return Operands(self.q[row : row + 1], *nodes, plan, node_mask, (keys, values), mask)


def operands(lengths: list[int], branch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Operands:
    """Row i has lengths[i] real tokens, anywhere among max(lengths)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.stack([torch.randperm(max(lengths), generator=generator) < length for length in lengths])
    keys, values = torch.randn(2, *mask.shape, HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    plan, *nodes, node_mask = mean_tree(keys, values, branch, mask)
    q = 2 * torch.randn(len(lengths), QUERIES, HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return Operands(q, *nodes, plan, node_mask, (keys, values), mask)


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keys, values))).transpose(1, 2)


def coverage(plan: TreePlan, rows: Tensor) -> Tensor:
    """How many of the nodes in `rows` (-1 is none) every leaf slot lies below: (b, m, leaves)."""
    levels = [torch.eye(plan.branch**level, dtype=torch.int64) for level in range(1, plan.depth + 1)]
    leaves = [level.repeat_interleave(plan.leaves // len(level), dim=1) for level in levels]
    nothing = torch.zeros(1, plan.leaves, dtype=torch.int64)
    return torch.cat([*leaves, torch.eye(plan.leaves, dtype=torch.int64), nothing])[rows].sum(dim=2)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------ what is read


@properties
@given(lengths_of_rows, branches, budgets, seeds, st.booleans(), st.booleans())
def test_what_is_read_covers_every_real_token_once(
    lengths: list[int], branch: int, budget: int, seed: int, sampled: bool, counted: bool
) -> None:
    """It holds no padding, the whole leaf block of the path, and no more than the budget or what one path leaves."""
    x = operands(lengths, branch, seed)
    found = x.attend(budget, x.noise(seed) if sampled else None, log_count=x.counts() if counted else None)
    assert (coverage(x.plan, found.rows).masked_fill(~x.real[:, None], 1) == 1).all()
    used = found.rows >= 0
    assert x.node_mask[torch.arange(len(lengths))[:, None, None], found.rows.clamp_min(0)][used].all()
    path = selected_nodes(x.plan, found.path, x.node_mask)
    assert (used.sum(dim=2) <= (path >= 0).sum(dim=2).clamp_min(budget)).all()
    block = path[..., x.plan.depth * (x.plan.branch - 1) :, None]
    assert ((block == found.rows[:, :, None]).any(dim=3) | (block[..., 0] < 0)).all()


@properties
@given(st.integers(1, 70), branches, budgets, seeds)
def test_a_context_without_padding_is_covered_once(n: int, branch: int, budget: int, seed: int) -> None:
    """Full trees have no mask."""
    x = operands([n], branch, seed).alone(0)
    rows = x.attend(budget, x.noise(seed)).rows
    assert (coverage(x.plan, rows).masked_fill(~x.real[:, None], 1) == 1).all()
    assert ((rows >= 0).sum(dim=2) <= max(budget, x.plan.tokens)).all()


@pytest.mark.parametrize("budget", [1, 12, 20, 32])
def test_leaf_blocks_may_be_wider_than_the_tree_branches(budget: int) -> None:
    """`TreePlan` takes any block that is wide enough; its slots are tokens, too."""
    plan = TreePlan(33, 2, block=4)
    q, keys, values = (torch.randn(1, size, 1, 4) for size in (5, plan.nodes, plan.nodes))
    rows = tree_attention(q, keys, values, plan, impl="reference", budget=budget).rows
    assert (coverage(plan, rows) == 1).all()


@fewer
@given(st.integers(2, 60), st.integers(2, 4), seeds)
def test_more_is_read_the_larger_the_budget(n: int, branch: int, seed: int) -> None:
    x = operands([n], branch, seed)
    read = [(x.attend(budget).rows >= 0).sum(dim=2) for budget in range(1, n + 1, max(1, n // 4))]
    assert all((less <= more).all() for less, more in pairwise(read))


@fewer
@given(lengths_of_rows, branches, seeds, st.booleans(), st.sampled_from(PRECISIONS))
def test_without_a_budget_nothing_has_changed(
    lengths: list[int], branch: int, seed: int, sampled: bool, precision: tuple[torch.dtype, float]
) -> None:
    x = operands(lengths, branch, seed, precision[0])
    noise = x.noise(seed) if sampled else None
    found, plain = x.attend(None, noise), search_reference(SearchInputs(*x[:5], noise))
    assert all(torch.equal(a, b) for a, b in zip(found[:4], plain, strict=True))
    assert found.rows is None and found.lse is None


@fewer
@given(lengths_of_rows, branches, seeds, st.booleans(), st.sampled_from(PRECISIONS))
def test_a_budget_of_one_path_reads_one_path(
    lengths: list[int], branch: int, seed: int, sampled: bool, precision: tuple[torch.dtype, float]
) -> None:
    """Budgets from 1 to what the path of a row leaves: the same nodes, the same output."""
    dtype, tolerance = precision
    x = operands(lengths, branch, seed, dtype)
    noise = x.noise(seed) if sampled else None
    path = x.attend(None, noise)
    selected = selected_nodes(x.plan, path.path, x.node_mask).sort(dim=2).values
    for row, length in enumerate(lengths):
        for budget in {1, min(length - 1, TreePlan(length, branch).tokens)} - {0}:
            found = x.attend(budget, noise)
            rows = found.rows[row].sort(dim=1).values
            assert torch.equal(rows[:, (rows >= 0).any(0)], selected[row][:, (selected[row] >= 0).any(0)])
            close(found.output[row], path.output[row], tolerance)
            assert all(torch.equal(a[row], b[row]) for a, b in zip(found[1:4], path[1:4], strict=True))


@properties
@given(lengths_of_rows, branches, budgets, seeds, st.booleans(), st.sampled_from(PRECISIONS))
def test_a_budget_of_all_tokens_is_full_attention(
    lengths: list[int], branch: int, budget: int, seed: int, lse: bool, precision: tuple[torch.dtype, float]
) -> None:
    """For every row of a ragged batch that has no more tokens than the budget."""
    dtype, tolerance = precision
    x = operands(lengths, branch, seed, dtype)
    found = x.attend(budget, lse=lse, log_count=x.counts())
    for row, length in enumerate(lengths):
        if length <= budget:
            keys, values = (part[row : row + 1, x.mask[row]] for part in x.tokens)
            close(found.output[row : row + 1], sdpa(x.q[row : row + 1], keys, values), 3 * tolerance)
            assert ((found.rows[row] >= 0).sum(dim=1) == length).all()


@fewer
@given(lengths_of_rows, branches, budgets, seeds, st.booleans(), st.booleans())
def test_a_ragged_row_is_read_as_if_alone(
    lengths: list[int], branch: int, budget: int, seed: int, sampled: bool, masked: bool
) -> None:
    x = operands(lengths, branch, seed)
    noise = x.noise(seed) if sampled else None
    together = x.attend(budget, noise, lse=True, log_count=x.counts())
    for row in range(len(lengths)):
        own = x.alone(row, masked)
        own_noise = None if noise is None else noise[row : row + 1, :, x.plan.depth - own.plan.depth :]
        alone = own.attend(budget, own_noise, lse=True, log_count=own.counts())
        assert torch.equal((together.rows[row] >= 0).sum(dim=1), (alone.rows[0] >= 0).sum(dim=1))
        for batched, single in zip(together[:5], alone[:5], strict=True):
            close(batched[row : row + 1], single, 1e-12)


@fewer
@given(lengths_of_rows, branches, budgets, seeds)
def test_rows_come_in_order_with_the_unused_ones_last(lengths: list[int], branch: int, budget: int, seed: int) -> None:
    x = operands(lengths, branch, seed)
    found = x.attend(budget)
    if budget < x.plan.n:
        known = found.rows.masked_fill(found.rows < 0, x.plan.nodes)
        assert torch.equal(known, known.sort(dim=2).values)
        assert found.rows.shape[2] <= max(budget, x.plan.tokens)


def test_neither_slot_in_the_batch_nor_place_among_queries_matters() -> None:
    x = operands([40, 23, 9, 40], 2, dtype=torch.float32)
    noise, order, queries = x.noise(), torch.tensor([2, 0, 3, 1]), torch.tensor([3, 1, 0, 2])
    parts = (x.q[order][:, queries], x.keys[order], x.values[order], x.plan, x.node_mask[order])
    moved = tree_attention(*parts, noise[order][:, queries], impl="reference", budget=14, lse=True)
    for there, here in zip(moved, x.attend(14, noise, lse=True), strict=True):
        assert torch.equal(there, here[order][:, queries])


# ------------------------------------------------------------------------------------------------ what promises most


def test_the_budget_goes_where_the_attention_is() -> None:
    """Two distant tokens that matter: one path finds one of them, one opened node more finds both."""
    keys = torch.zeros(1, 16, 1, 1, dtype=torch.float64)
    keys[0, [1, 14]] = torch.tensor([8.0, 7.0], dtype=torch.float64)[:, None, None]
    plan, *nodes, mask = mean_tree(keys, keys.clone(), 2, None)
    counts = log_counts(plan, mask, keys)
    found = tree_attention(torch.ones(1, 1, 1, 1, dtype=torch.float64), *nodes, plan, mask, budget=8, log_count=counts)
    read = set(found.rows[0, 0].tolist())
    assert found.path.item() == 0 and {plan.leaf_offset + 1, plan.leaf_offset + 14} <= read


def test_a_large_budget_is_closer_to_full_attention() -> None:
    """On a smooth context: the error falls from one path to half of the tokens, and is gone with all of them."""
    place = torch.linspace(0, 6, 64, dtype=torch.float64)
    waves = torch.stack([(place * f + p).sin() for f, p in ((1, 0), (1, 1.5), (0.5, 0), (0.5, 1.5))], dim=1)
    keys, values = waves[None, :, None], waves.flip(1)[None, :, None]
    plan, *nodes, mask = mean_tree(keys, values, 2, None)
    q = 3 * waves[None, ::5, None]
    errors = []
    for budget in (1, 12, 24, 40, 64):
        found = tree_attention(q, *nodes, plan, mask, budget=budget, log_count=log_counts(plan, mask, keys))
        errors.append(float((found.output - sdpa(q, keys, values)).abs().mean()))
    assert all(later < 0.75 * earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-12


# ------------------------------------------------------------------------------------------------ padding, bad numbers


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("budget", [None, 4, 9, 20, 30])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -1e30])
def test_what_padding_holds_never_matters(garbage: float, budget: int | None, lse: bool) -> None:
    """Neither for outputs nor for gradients; padding gets gradient 0. The budgets end in all tokens and more."""
    x = operands([20, 11, 1], 3)
    noise, counts = x.noise(), x.counts()
    results = []
    for filled in (0.0, garbage):
        padding = ~x.node_mask[..., None, None]
        tensors = [x.q.clone(), x.keys.masked_fill(padding, filled), x.values.masked_fill(padding, filled)]
        tensors = [part.requires_grad_() for part in tensors]
        found = tree_attention(
            *tensors, x.plan, x.node_mask, noise, impl="reference", budget=budget, lse=lse, log_count=counts
        )
        loss = found.output.square().sum() + (found.lse.square().sum() if lse else 0)
        gradients = torch.autograd.grad(loss, tensors)
        assert not any(part[~x.node_mask].any() for part in gradients[1:])
        results.append([found.output.detach(), *([found.lse.detach()] if lse else []), *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("budget", [1, 8, 12, 16, 20])
def test_keys_that_are_no_numbers_are_not_hidden(budget: int) -> None:
    """A search that read them must not look as if it had worked: all nodes spoilt, or the leaves alone."""
    x = operands([16], 2).alone(0)
    for first in (0, x.plan.leaf_offset):
        keys = x.keys.clone()
        keys[:, first:] = torch.nan
        assert x._replace(keys=keys).attend(budget).output.isnan().all()


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    ("lengths", "branch", "budget", "counted"),
    [([3], 4, 1, False), ([5, 3], 2, 4, True), ([9, 4], 3, 6, False), ([5, 2], 2, 8, True)],
)
def test_gradients_are_right(lengths: list[int], branch: int, budget: int, counted: bool) -> None:
    """Of output and log-sum-exp, where what is read stays the same."""
    x = operands(lengths, branch, seed=3)
    x = x._replace(q=x.q[:, :2, :, :2], keys=x.keys[..., :2], values=x.values[..., :2])
    counts = x.counts() if counted else None

    def read(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        found = x._replace(q=q, keys=keys, values=values).attend(budget, lse=True, log_count=counts)
        return found.output, found.lse

    inputs = tuple(part.clone().requires_grad_() for part in (x.q, x.keys, x.values))
    assert torch.autograd.gradcheck(read, inputs, eps=1e-6, atol=1e-5)


def test_gradients_reach_what_was_read_and_nothing_else() -> None:
    x = operands([40, 17], 2)
    keys, values = (part.clone().requires_grad_() for part in (x.keys, x.values))
    found = x._replace(keys=keys, values=values).attend(14)
    found.output.square().sum().backward()
    rows = found.rows.flatten(1) % (x.plan.nodes + 1)  # -1 is one behind the last
    read = torch.zeros(2, x.plan.nodes + 1, dtype=torch.bool).scatter(1, rows, True)
    for part in (keys, values):
        assert torch.equal(part.grad.flatten(2).abs().sum(dim=2) > 0, read[:, :-1])


def test_a_budget_leaves_the_policy_its_gradients() -> None:
    """Paths, their probabilities and entropies are those of the search, with their gradients."""
    x = operands([20, 11], 3)
    gradients = []
    for budget in (None, 9, 20):
        q, keys = x.q.clone().requires_grad_(), x.keys.clone().requires_grad_()
        found = x._replace(q=q, keys=keys).attend(budget, x.noise())
        gradients.append(torch.autograd.grad((found.log_prob + found.entropy).square().sum(), (q, keys)))
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def test_second_derivatives_and_transforms_run_in_plain_torch() -> None:
    x = operands([20], 2)

    def total(q: Tensor) -> Tensor:
        return x._replace(q=q).attend(9).output.square().sum()

    q = x.q.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(q), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    assert second.isfinite().all() and second.any()
    close(torch.func.grad(total)(x.q), first.detach(), 1e-12)


# ------------------------------------------------------------------------------------------------ log-sum-exp and parts


def parts_of(q: Tensor, keys: Tensor, values: Tensor, cuts: list[int], branch: int) -> list[Part]:
    """A tree over every stretch of the tokens between two cuts, each read whole."""
    found = []
    for start, stop in zip([0, *cuts], [*cuts, keys.shape[1]], strict=True):
        plan, *nodes, mask = mean_tree(keys[:, start:stop], values[:, start:stop], branch, None)
        part = tree_attention(q, *nodes, plan, mask, impl="reference", budget=stop - start, lse=True)
        found.append(Part(part.output, part.lse))
    return found


@fewer
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(2, 4), seeds)
def test_merged_parts_are_attention_to_all_their_tokens(sizes: list[int], branch: int, seed: int) -> None:
    """Outputs, log-sum-exps and gradients."""
    x = operands([sum(sizes)], 2, seed)
    tensors = [part.clone().requires_grad_() for part in (x.q, *x.tokens)]
    cuts = torch.tensor(sizes).cumsum(0)[:-1].tolist()
    merged = merge_parts(parts_of(*tensors, cuts, branch))
    want, scores = sdpa(*tensors), torch.einsum("bmhe,bnhe->bmhn", *tensors[:2]) * WIDTH**-0.5
    close(merged.output, want, 1e-12)
    close(merged.lse, scores.logsumexp(dim=3), 1e-12)
    slope = torch.cos(torch.arange(want.numel(), dtype=want.dtype)).view_as(want)
    got = torch.autograd.grad((merged.output * slope).sum() + merged.lse.square().sum(), tensors)
    exact = torch.autograd.grad((want * slope).sum() + scores.logsumexp(dim=3).square().sum(), tensors)
    for a, b in zip(got, exact, strict=True):
        close(a, b, 1e-11)


def test_parts_may_be_merged_in_any_order_and_one_after_the_other() -> None:
    x = operands([30], 2, dtype=torch.float32)
    one, two, three = parts_of(x.q, *x.tokens, [7, 19], 2)
    at_once = merge_parts([one, two, three])
    for other in (merge_parts([three, one, two]), merge_parts([merge_parts([one, two]), three])):
        close(other.output, at_once.output, 1e-6)
        close(other.lse, at_once.lse, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(merge_parts([one]), one, strict=True))


@pytest.mark.parametrize("lse", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_weights_of_parts_sum_to_one_however_large_the_scores(lse: float) -> None:
    parts = [Part(torch.full((1, 2, 1, 1), value), torch.full((1, 2, 1), lse)) for value in (1.0, 3.0)]
    assert merge_parts(parts).output.flatten().tolist() == pytest.approx([2, 2], rel=1e-6)
    far = Part(torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), lse - 1e4))
    assert merge_parts([parts[1], far]).output.flatten().tolist() == pytest.approx([3, 3], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = operands([20, 9], 2, dtype=dtype)
    wide = x._replace(q=x.q.float(), keys=x.keys.float(), values=x.values.float())
    for budget in (None, 7, 12):
        found, exact = (y.attend(budget, lse=True, log_count=x.counts()) for y in (x, wide))
        assert found.output.dtype == dtype and found.lse.dtype == torch.float32
        if budget:  # one path with log counts rounds a scaled query
            assert torch.equal(found.output, exact.output.to(dtype)) and torch.equal(found.lse, exact.lse)
    merged = merge_parts([Part(found.output, found.lse)] * 2)
    assert merged.output.dtype == dtype and merged.lse.dtype == torch.float32


@properties
@given(lengths_of_rows, branches, st.one_of(st.none(), budgets), seeds, st.booleans())
def test_the_log_sum_exp_is_that_of_the_scores_read(
    lengths: list[int], branch: int, budget: int | None, seed: int, counted: bool
) -> None:
    x = operands(lengths, branch, seed)
    counts = x.counts() if counted else torch.zeros(len(lengths), x.plan.nodes, dtype=torch.float64)
    found = x.attend(budget, lse=True, log_count=counts if counted else None)
    scores = torch.einsum("bmhe,bthe->bmth", x.q, x.keys) * WIDTH**-0.5 + counts[:, None, :, None]
    rows = selected_nodes(x.plan, found.path, x.node_mask) if found.rows is None else found.rows
    picked = scores.gather(2, rows.clamp_min(0)[..., None].expand(-1, -1, -1, HEADS))
    picked = picked.masked_fill(rows[..., None] < 0, -torch.inf)
    close(found.lse, picked.logsumexp(dim=2), 1e-12)


# ------------------------------------------------------------------------------------------------ arguments, compiling


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "8", 2**63])
def test_budgets_that_mean_nothing_are_refused(budget: Any) -> None:
    x = operands([9], 2)
    module = TreeCrossAttention(8, 2)
    calls = (
        lambda: x.attend(budget),
        lambda: TreeCrossAttention(8, 2, budget=budget),
        lambda: module(torch.zeros(1, 1, 8), module.build(torch.zeros(1, 3, 8)), budget=budget),
        lambda: TreeCrossAttention.from_multihead(torch.nn.MultiheadAttention(8, 2, batch_first=True), budget=budget),
    )
    for call in calls:
        with pytest.raises(InputError, match=r"^budget: expected an int (>= 1|< 2\*\*63), got [^\n]*$"):
            call()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("lse", {"lse": "yes"}),
        ("log_count", {"log_count": torch.zeros(1, 13)}),
        ("log_count", {"log_count": torch.zeros(1, 30, dtype=torch.int64)}),
    ],
)
def test_unusable_arguments_are_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    x = operands([9], 2)
    assert x.plan.nodes == 30
    with pytest.raises(InputError, match=rf"^{argument}: expected"):
        x.attend(6, **change)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_budgeted_call_compiles_whole(impl: Any) -> None:
    """Build and search in one graph, with padding: what is read stays the same."""
    torch.manual_seed(0)
    module = TreeCrossAttention(8, 2, aggregator="mean", log_count=True, budget=6, impl=impl).eval()
    query, context, mask = torch.randn(2, 3, 8), torch.randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [4]])

    def search(query: Tensor, context: Tensor) -> Any:
        return module(query, module.build(context, mask))

    with torch.no_grad():
        eager = search(query, context)
        fused = torch.compile(search, fullgraph=True, backend="aot_eager")(query, context)
    torch.compiler.reset()
    close(fused.output, eager.output, 1e-6)
    assert torch.equal(fused.path, eager.path) and torch.equal(fused.rows, eager.rows)
