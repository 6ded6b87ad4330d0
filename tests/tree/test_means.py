"""Trees of means: every node against the mean of the tokens below it, and when a mean stands for them exactly."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import TreeCrossAttention, TreePlan, full_attention, tree_attention
from retreever.tree.means import log_counts, mean_tree

EXAMPLES = int(os.environ.get("RETREEVER_EXAMPLES", "200"))
properties = settings(max_examples=EXAMPLES // 4, derandomize=True, deadline=None)
lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=3)
branches, seeds = st.integers(2, 6), st.integers(0, 10_000)
HEADS, WIDTH = 2, 3
MeanTree = tuple[TreePlan, Tensor, Tensor, Tensor | None]


def tokens(b: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, b, n, HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return keys, values


def scattered_mask(lengths: list[int], seed: int = 0) -> Tensor:
    """Row i has lengths[i] real tokens, anywhere among max(lengths)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(max(lengths), generator=generator) < length for length in lengths])


def below(plan: TreePlan, n: int) -> dict[int, list[int]]:
    """Tokens below every node of a context of `n`, by walking up from its leaves; blocks are filled evenly."""
    own = TreePlan(n, plan.branch)
    found: dict[int, list[int]] = {}
    for block in range(own.blocks):
        first, last = block * n // own.blocks, (block + 1) * n // own.blocks
        for place, token in enumerate(range(first, last)):
            found[plan.leaf_offset + block * plan.block + place] = [token]
            node = block
            for level in range(plan.depth, 0, -1):
                found.setdefault(plan.offsets[level] + node, []).append(token)
                node //= plan.branch
    return found


def check_nodes(row: int, mask: Tensor, tree: MeanTree, given_: tuple[Tensor, Tensor], tolerance: float) -> None:
    """The nodes of a row, their log counts and which of them are real."""
    plan, keys, values, node_mask = tree
    tokens_below = below(plan, int(mask[row].sum()))
    real = list(range(plan.nodes)) if node_mask is None else node_mask[row].nonzero()[:, 0].tolist()
    assert sorted(tokens_below) == real
    inside = torch.zeros(plan.nodes, int(mask[row].sum()), dtype=torch.float64)
    for node, places in tokens_below.items():
        inside[node, places] = 1
    counts = inside.sum(dim=1)[real]
    close(log_counts(plan, node_mask, keys)[row, real].double(), counts.log(), 1e-6)
    for nodes, all_tokens in zip((keys, values), given_, strict=True):
        means = inside[real] @ all_tokens[row, mask[row]].double().flatten(1) / counts[:, None]
        close(nodes[row, real].double().flatten(1), means, tolerance)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["f32", "f64"])
@properties
@given(lengths_of_rows, branches, seeds)
def test_a_node_is_the_mean_of_the_tokens_below_it(
    dtype: torch.dtype, tolerance: float, lengths: list[int], branch: int, seed: int
) -> None:
    """In ragged batches of the real ones alone, which may lie anywhere."""
    mask = scattered_mask(lengths, seed)
    given_ = tokens(*mask.shape, seed, dtype)
    tree = mean_tree(*given_, branch, mask)
    assert tree[1].dtype == tree[2].dtype == dtype
    for row in range(len(lengths)):
        check_nodes(row, mask, tree, given_, tolerance)


@pytest.mark.parametrize("branch", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9, 16, 25, 26])
def test_a_context_without_a_mask_has_the_same_means(n: int, branch: int) -> None:
    """Full trees and others."""
    given_, mask = tokens(2, n), torch.ones(2, n, dtype=torch.bool)
    tree = mean_tree(*given_, branch, None)
    assert tree[0] == TreePlan(n, branch) and (tree[3] is None) is tree[0].full
    for row in range(2):
        check_nodes(row, mask, tree, given_, 1e-12)


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(("n", "branch"), [(1, 2), (2, 2), (16, 2), (27, 3), (25, 5)])
def test_means_are_the_same_whether_or_not_a_gradient_is_wanted(n: int, branch: int, b: int) -> None:
    """Without one, all levels are written into one tensor; halves of a projection are not copied together first."""
    keys, values = tokens(b, n, dtype=torch.float32)
    with torch.no_grad():
        plain = mean_tree(keys, values, branch, None)
    trained = mean_tree(keys.requires_grad_(), values, branch, None)
    assert plain[3] is trained[3] is None and trained[1].requires_grad
    assert torch.equal(plain[1], trained[1]) and torch.equal(plain[2], trained[2])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_nothing_on_the_way_up(dtype: torch.dtype, masked: bool) -> None:
    """A mean of 1024 tokens has the rounding of a few additions, not of a thousand."""
    keys, values = (part.to(dtype) for part in tokens(1, 1024))
    mask = torch.ones(1, 1024, dtype=torch.bool) if masked else None
    plan, nodes, _, node_mask = mean_tree(keys + 1, values, 2, mask)
    top = (keys + 1)[0].double().reshape(2, 512, HEADS, WIDTH).mean(dim=1)
    assert nodes.dtype == dtype
    assert float((nodes[0, :2].double() - top).abs().max()) <= 4 * torch.finfo(dtype).eps
    assert log_counts(plan, node_mask, nodes).dtype == torch.float32


@pytest.mark.parametrize("lengths", [[8], [7, 3, 1]])
def test_gradients_reach_every_real_token(lengths: list[int]) -> None:
    mask = scattered_mask(lengths)
    keys, values = (part.requires_grad_() for part in tokens(*mask.shape))
    assert torch.autograd.gradcheck(lambda k, v: mean_tree(k, v, 2, mask)[1:3], (keys, values))
    sum(part.sum() for part in mean_tree(keys, values, 2, mask)[1:3]).backward()
    for part in (keys, values):
        assert bool((part.grad[~mask] == 0).all()) and bool((part.grad[mask] > 0).all())


@properties
@given(st.integers(2, 40), branches, seeds)
def test_a_mean_of_equal_keys_stands_for_all_of_them(n: int, branch: int, seed: int) -> None:
    """One path with log counts is attention to all tokens where the tokens it does not open have equal keys."""
    keys, values = tokens(1, n, seed)
    plan, _, _, node_mask = mean_tree(keys, values, branch, None)
    generator = torch.Generator().manual_seed(seed)
    end = int(torch.randint(plan.blocks, (), generator=generator))
    for node, places in below(plan, n).items():
        level = next((lv for lv in range(1, plan.depth + 1) if node < plan.offsets[lv + 1]), None)
        if level is None:
            continue
        place, on_path = node - plan.offsets[level], end // plan.branch ** (plan.depth - level)
        if place != on_path and place // plan.branch == on_path // plan.branch:  # a sibling of the path
            keys[0, places] = keys[0, places[0]].clone()
    steps = [end // plan.branch ** (plan.depth - level) % plan.branch for level in range(1, plan.depth + 1)]
    q = torch.randn(1, 1, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    plan, node_keys, node_values, node_mask = mean_tree(keys, values, branch, None)
    choices = torch.tensor(steps, dtype=torch.int64).reshape(1, 1, plan.depth)
    counts = log_counts(plan, node_mask, node_keys)
    found = tree_attention(q, node_keys, node_values, plan, node_mask, None, choices, "reference", log_count=counts)
    assert int(found.path) == end
    everything = full_attention(q, node_keys, node_values, plan, node_mask, "reference")
    close(found.output, everything, 1e-12)
    without = tree_attention(q, node_keys, node_values, plan, node_mask, None, choices, "reference")
    assert n <= plan.block or plan.tokens == n or not torch.allclose(without.output, everything, rtol=0, atol=1e-6)


@properties
@given(lengths_of_rows, branches, seeds, st.booleans())
def test_log_counts_change_nothing_where_all_tokens_are_read(
    lengths: list[int], branch: int, seed: int, lse: bool
) -> None:
    mask = scattered_mask(lengths, seed)
    plan, keys, values, node_mask = mean_tree(*tokens(*mask.shape, seed), branch, mask)
    q = tokens(len(lengths), 4, seed + 1)[0]
    counts = log_counts(plan, node_mask, keys)
    found = tree_attention(q, keys, values, plan, node_mask, impl="reference", budget=plan.n, log_count=counts, lse=lse)
    everything = full_attention(q, keys, values, plan, node_mask, "reference")
    close(found.output, everything, 1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_the_module_builds_means_of_what_it_projects(masked: bool) -> None:
    """Norm and projections come first, the means after them: a mean of tokens would be normalised to another length."""
    torch.manual_seed(0)
    module = TreeCrossAttention(8, 2, aggregator="mean", log_count=True).double()
    context = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4]]) if masked else None
    tree = module.build(context, mask)
    plan, keys, values, node_mask = mean_tree(*module.block.key_values(context), 2, mask)
    assert tree.plan == plan and torch.equal(tree.keys, keys) and torch.equal(tree.values, values)
    assert node_mask is not None and tree.mask is not None and torch.equal(tree.mask, node_mask)
    assert tree.log_count is not None and torch.equal(tree.log_count, log_counts(plan, node_mask, keys))
