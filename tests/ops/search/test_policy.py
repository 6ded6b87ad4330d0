"""The search: path probabilities against a plain enumeration, sampling by noise, padding never chosen."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from retreever.ops.search.api import TreeAttention, tree_attention
from retreever.tree.aggregate import MeanAggregator
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan
from retreever.tree.selected import path_nodes

HEADS, WIDTH = 2, 3
SHAPES = [(256, 2, None), (81, 3, None), (100, 4, None), (8, 8, None), (50, 2, 29), (70, 5, 26), (9, 2, 1)]
over_shapes = pytest.mark.parametrize(("n", "branch", "real"), SHAPES)


class Search(NamedTuple):
    """One query and one tree; many copies of the query walk it, each with noise of its own."""

    q: Tensor
    keys: Tensor
    plan: TreePlan
    node_mask: Tensor | None

    def walk(self, noise: Tensor | None, choices: Tensor | None = None) -> TreeAttention:
        """noise and choices (m, depth); without either the most likely children are taken."""
        count = next((len(given) for given in (noise, choices) if given is not None), 1)
        q = self.q.expand(1, count, HEADS, WIDTH)
        draws = (None if given is None else given[None] for given in (noise, choices))
        return tree_attention(q, self.keys, self.keys, self.plan, self.node_mask, *draws, impl="reference")


class Path(NamedTuple):
    end: int
    probability: float
    entropy: float
    noise: list[float]


def search(n: int, branch: int, real: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Search:
    """Random keys for every node; with `real`, the row is a short one in a batch whose tree is made for n tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = None if real is None else torch.arange(n)[None] < real
    plan, _, node_mask = build_nodes(torch.zeros(1, n, 1), MeanAggregator(), branch, mask)
    q = torch.randn(1, 1, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    keys = 1.5 * torch.randn(1, plan.nodes, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    return Search(q.to(dtype), keys.to(dtype), plan, node_mask)


def policy(s: Search, level: int, node: int) -> list[float]:
    """Head mean of the softmax over the real children of a node, by hand."""
    rows = [s.plan.offsets[level] + node * s.plan.branch + child for child in range(s.plan.branch)]
    real = [s.node_mask is None or bool(s.node_mask[0, row]) for row in rows]
    q, keys = s.q[0, 0].tolist(), s.keys[0, rows].tolist()
    total = [0.0] * len(rows)
    for head in range(HEADS):
        scores = [sum(a * b for a, b in zip(q[head], key[head], strict=True)) / math.sqrt(WIDTH) for key in keys]
        weights = [math.exp(score) if is_real else 0.0 for score, is_real in zip(scores, real, strict=True)]
        total = [t + weight / sum(weights) / HEADS for t, weight in zip(total, weights, strict=True)]
    return total


def enumerate_paths(s: Search) -> list[Path]:
    """All paths with probability > 0, each with noise in the middle of the intervals that lead there."""
    paths = [Path(0, 1.0, 0.0, [])]
    for level in range(1, s.plan.depth + 1):
        longer = []
        for path in paths:
            probabilities = policy(s, level, path.end)
            entropy = path.entropy - sum(p * math.log(p) for p in probabilities if p > 0)
            for child, p in enumerate(probabilities):
                middle = sum(probabilities[:child]) + p / 2
                if p > 0:
                    end = path.end * s.plan.branch + child
                    longer.append(Path(end, path.probability * p, entropy, [*path.noise, middle]))
        paths = longer
    return paths


def forced(s: Search, paths: list[Path]) -> TreeAttention:
    return s.walk(torch.tensor([path.noise for path in paths], dtype=torch.float64).view(len(paths), s.plan.depth))


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@over_shapes
def test_probabilities_of_all_paths_sum_to_one(n: int, branch: int, real: int | None) -> None:
    s = search(n, branch, real)
    paths = enumerate_paths(s)
    found = forced(s, paths)
    assert found.path[0].tolist() == [path.end for path in paths]
    assert abs(float(found.log_prob.exp().sum()) - 1) <= 1e-6
    if real is None:
        assert len(paths) == s.plan.blocks
    else:
        assert len(paths) == TreePlan(real, branch).blocks  # the row's own tree, no more


@pytest.mark.parametrize("sharpness", [1, 5])
@over_shapes
def test_log_prob_and_entropy_equal_the_enumeration(n: int, branch: int, real: int | None, sharpness: int) -> None:
    """Also for very unlikely children, whose logarithm is large."""
    s = search(n, branch, real)
    s = s._replace(q=sharpness * s.q)
    paths = enumerate_paths(s)
    found = forced(s, paths)
    expected = torch.tensor([[path.probability, path.entropy] for path in paths], dtype=torch.float64)
    torch.testing.assert_close(found.log_prob[0], expected[:, 0].log(), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.entropy[0], expected[:, 1], rtol=0, atol=1e-10)


@over_shapes
def test_expected_entropy_is_the_entropy_of_the_path_distribution(n: int, branch: int, real: int | None) -> None:
    s = search(n, branch, real)
    found = forced(s, enumerate_paths(s))
    probability = found.log_prob.exp()
    of_paths = -(probability * found.log_prob).sum()
    torch.testing.assert_close((probability * found.entropy).sum(), of_paths, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "branch", "real"), [(16, 2, None), (27, 3, None), (16, 2, 7)])
def test_sampled_paths_have_the_frequencies_of_the_policy(n: int, branch: int, real: int | None) -> None:
    s = search(n, branch, real, seed=3, dtype=torch.float32)
    paths = enumerate_paths(s)
    noise = torch.rand(20_000, s.plan.depth, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(s.walk(noise).path[0], minlength=s.plan.blocks)
    ends = [path.end for path in paths]
    expected = 20_000 * torch.tensor([path.probability for path in paths], dtype=torch.float64)
    assert float(expected.min()) > 5  # else the test says nothing
    assert int(counts[ends].sum()) == 20_000
    assert chi_square_p(counts[ends], expected) > 1e-4
    assert chi_square_p(counts[ends], expected.flip(0)) < 1e-4  # and it can tell


def test_the_chi_square_tail_is_right() -> None:
    """3.841 and 18.307 are the 5 % points with 1 and 10 degrees of freedom."""
    for degrees, point in ((1, 3.841), (10, 18.307)):
        observed = torch.full((degrees + 1,), 1.0, dtype=torch.float64)
        observed[0] += math.sqrt(point)
        assert chi_square_p(observed, torch.ones(degrees + 1, dtype=torch.float64)) == pytest.approx(0.05, abs=1e-4)


def test_the_same_noise_takes_the_same_path() -> None:
    s = search(100, 3)
    noise = torch.rand(64, s.plan.depth, generator=torch.Generator().manual_seed(0))
    first = s.walk(noise)
    assert torch.equal(first.path, s.walk(noise.clone()).path)
    assert torch.equal(first.path, s.walk(noise.double()).path)
    assert len(first.path.unique()) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_path_changes_exactly_at_the_borders(dtype: torch.dtype) -> None:
    """Four equal children: their intervals are [0, 1/4), [1/4, 1/2), [1/2, 3/4), [3/4, 1), to the last bit."""
    s = search(16, 4, dtype=dtype)
    s = s._replace(keys=torch.zeros_like(s.keys))
    borders = torch.tensor([0.25, 0.5, 0.75], dtype=dtype)
    below = torch.nextafter(borders, torch.zeros_like(borders))
    assert s.walk(borders[:, None]).path.tolist() == [[1, 2, 3]]
    assert s.walk(below[:, None]).path.tolist() == [[0, 1, 2]]
    ends = torch.stack([torch.zeros((), dtype=dtype), torch.nextafter(torch.ones((), dtype=dtype), borders[0])])
    assert s.walk(ends[:, None]).path.tolist() == [[0, 3]]


@pytest.mark.parametrize("branch", [2, 3, 5])
def test_borders_are_the_cumulative_probabilities(branch: int) -> None:
    s = search(branch * branch, branch)
    assert s.plan.depth == 1
    borders = torch.tensor(policy(s, 1, 0), dtype=torch.float64).cumsum(dim=0)[:-1, None]
    children = list(range(branch))
    assert s.walk(borders - 1e-12).path[0].tolist() == children[:-1]
    assert s.walk(borders + 1e-12).path[0].tolist() == children[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "branch"), [(9, 2), (30, 3), (40, 4), (20, 7)])
def test_padding_is_never_chosen(n: int, branch: int, dtype: torch.dtype) -> None:
    for real in range(1, n + 1):
        s = search(n, branch, real, dtype=dtype)
        extremes = torch.tensor([0.0, 1e-38, 0.5, 0.9999999, 1 - 2**-24], dtype=torch.float32)
        noise = torch.cartesian_prod(*[extremes] * s.plan.depth).view(-1, s.plan.depth)
        for found in (s.walk(noise), s.walk(None)):
            assert bool(s.node_mask[0, path_nodes(s.plan, found.path)].all())
            assert bool(torch.isfinite(found.log_prob).all())


def test_rounding_of_the_last_border_does_not_lead_into_padding() -> None:
    """In float32 the probabilities often sum to a little less than 1, and the largest noise lies at or above that."""
    plan, queries = TreePlan(25, branch=5), 2000
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(1, size, HEADS, WIDTH, generator=generator) for size in (queries, plan.nodes))
    mask = torch.ones(1, plan.nodes, dtype=torch.bool)
    mask[0, 4] = False
    found = tree_attention(q, keys, keys, plan, mask, torch.full((1, queries, 1), 1 - 2**-24), impl="reference")
    assert found.path.unique().tolist() == [3]


@pytest.mark.parametrize("hole", [0, 1, 2])
def test_padding_between_real_children_is_never_chosen(hole: int) -> None:
    """Any node mask is allowed, not only the ones ragged batches make."""
    s = search(9, 3)
    mask = torch.ones(1, s.plan.nodes, dtype=torch.bool)
    mask[0, hole] = False
    noise = torch.linspace(0, 1 - 2**-24, 1000)[:, None]
    ends = s._replace(node_mask=mask).walk(noise).path
    assert ends.unique().tolist() == [child for child in range(3) if child != hole]


def test_a_single_real_child_is_no_decision() -> None:
    """Above the subtree of a short row: probability exactly 1, entropy exactly 0."""
    s = search(64, 2, real=2)
    found = s.walk(torch.rand(8, s.plan.depth, generator=torch.Generator().manual_seed(0)))
    assert not found.path.any() and not found.log_prob.any() and not found.entropy.any()


@pytest.mark.parametrize(("n", "branch", "real"), [(64, 2, None), (60, 3, None), (60, 4, 23)])
def test_without_noise_the_most_likely_child_is_taken(n: int, branch: int, real: int | None) -> None:
    s = search(n, branch, real)
    node, log_prob = 0, 0.0
    for level in range(1, s.plan.depth + 1):
        probabilities = policy(s, level, node)
        best = probabilities.index(max(probabilities))
        node, log_prob = node * branch + best, log_prob + math.log(probabilities[best])
    found = s.walk(None)
    assert found.path.tolist() == [[node]]
    assert float(found.log_prob) == pytest.approx(log_prob, abs=1e-10)


@pytest.mark.parametrize(("n", "branch", "real"), [(64, 2, None), (60, 3, None), (60, 4, 23)])
def test_choices_lead_to_every_path(n: int, branch: int, real: int | None) -> None:
    s = search(n, branch, real)
    blocks = torch.arange(s.plan.blocks)
    if s.node_mask is not None:
        blocks = blocks[s.node_mask[0, s.plan.offsets[s.plan.depth] :][: s.plan.blocks]]
    digits = [blocks // branch**level % branch for level in reversed(range(s.plan.depth))]
    found = s.walk(None, torch.stack(digits, dim=1))
    assert torch.equal(found.path[0], blocks)
    assert float(found.log_prob.exp().sum()) == pytest.approx(1, abs=1e-10)  # all paths, each with its probability


def test_ties_go_to_the_first_child() -> None:
    s = search(64, 4)
    assert s._replace(keys=torch.zeros_like(s.keys)).walk(None).path.tolist() == [[0]]


def test_the_policy_is_the_mean_of_softmaxes_not_the_softmax_of_means() -> None:
    """Two heads that cancel in the mean score still disagree as probabilities: 0.5 * (p + q), not one half."""
    plan = TreePlan(4)
    keys = torch.zeros(1, plan.nodes, HEADS, WIDTH, dtype=torch.float64)
    keys[0, 0, 0, 0], keys[0, 0, 1, 0] = 3.0, -1.0
    found = Search(torch.ones(1, 1, HEADS, WIDTH, dtype=torch.float64), keys, plan, None).walk(torch.zeros(1, 1))
    heads = [1 / (1 + math.exp(-score / math.sqrt(WIDTH))) for score in (3.0, -1.0)]
    assert float(found.log_prob.exp()) == pytest.approx(sum(heads) / 2, abs=1e-12)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e8])
def test_overwhelming_scores_stay_finite(scale: float) -> None:
    """Probabilities underflow to 0; values and gradients do not turn into NaN."""
    s = search(32, 2, dtype=torch.float32)
    q = (scale * s.q).requires_grad_()
    found = s._replace(q=q).walk(torch.tensor([[0.0] * 4, [0.5] * 4, [0.9999999] * 4]))
    (found.output.sum() + found.log_prob.sum() + found.entropy.sum()).backward()
    for part in (found.output, found.log_prob, found.entropy, q.grad):
        assert bool(torch.isfinite(part).all())
    assert bool((found.entropy >= 0).all()) and bool((found.log_prob <= 0).all())
