"""`TreeCrossAttention.fidelity`: errors, tokens and times of budgets, and the budget it picks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retreever import CrossAttention, Fidelity, InputError, TreeCrossAttention
from retreever.fidelity import Reading, default_budgets, median_ms
from retreever.tree.plan import TreePlan

DIM, HEADS, N, M = 16, 4, 96, 12


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multihead(training: bool = False) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True).train(training)


def converted(training: bool = False, **settings: Any) -> TreeCrossAttention:
    return TreeCrossAttention.from_multihead(multihead(training), **settings)


def context(n: int = N, b: int = 2) -> Tensor:
    """Tokens along a curve, so that neighbours are alike and means stand for them."""
    place = torch.linspace(0, 3, n)[None, :, None]
    return 3 * (place * torch.linspace(0.5, 2, DIM) + torch.arange(b)[:, None, None]).sin()


def readings(*errors: float) -> tuple[Reading, ...]:
    return tuple(Reading(8 * 2**i, 8.0 * 2**i, 0.1, error, error, 1.0) for i, error in enumerate(errors))


def test_errors_and_tokens_are_those_of_the_output() -> None:
    """Recomputed from the original attention and from calls of the module with the same budgets."""
    mha, module, tokens, queries = multihead(), converted(), context(), rand(2, M, DIM)
    measured = module.fidelity(queries, tokens, budgets=(None, 16, 48))
    exact = mha(queries, tokens, tokens, need_weights=False)[0].detach()
    tree = module.build(tokens)
    assert [row.budget for row in measured.rows] == [None, 16, 48, N]
    for row, budget in zip(measured.rows, (1, 16, 48, N), strict=True):
        found = module(queries, tree, budget=budget)
        difference = (found.output - exact).detach()
        assert row.error == pytest.approx(float(difference.norm() / exact.norm()), abs=1e-5)
        each = (difference.norm(dim=-1) / exact.norm(dim=-1)).flatten().sort().values
        assert row.error_95 == pytest.approx(float(each[22]), abs=1e-5)  # 23 of 24 are 95 of 100
        assert row.tokens == float(found.tokens_read.float().mean())
        assert row.share == pytest.approx(row.tokens / N)
        assert row.ms > 0
    errors = [row.error for row in measured.rows]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01 and errors[-1] == 0
    assert measured.build_ms > 0


def test_one_path_is_measured_whatever_the_budget_of_the_module() -> None:
    queries, tokens = rand(2, M, DIM), context()
    one = converted().fidelity(queries, tokens, budgets=(None,))
    other = converted(budget=64).fidelity(queries, tokens, budgets=(None,))
    assert one.rows[0].tokens == other.rows[0].tokens == TreePlan(N).tokens
    assert one.rows[0].error == other.rows[0].error > 0


def test_the_module_is_not_changed_and_training_does_not_matter() -> None:
    """In training paths are sampled; here they must not be."""
    module, queries, tokens = converted(training=True, budget=20), rand(2, M, DIM), context()
    rows = module.fidelity(queries, tokens, budgets=(None, 16)).rows
    evaluated = converted().fidelity(queries, tokens, budgets=(None, 16)).rows
    assert [row.error for row in rows] == [row.error for row in evaluated]
    assert all(part.training for part in module.modules())
    assert (module.budget, module.retrieval) == (20, "policy")
    assert all(weight.grad is None for weight in module.parameters())


def test_padding_counts_neither_as_tokens_nor_as_error() -> None:
    """A padded batch is measured like its contexts one by one."""
    mha, module, tokens, queries = multihead(), converted(), context(), rand(2, M, DIM)
    mask = torch.arange(N) < torch.tensor([[N], [40]])
    padded = tokens.masked_fill(~mask[..., None], torch.nan)
    rows = module.fidelity(queries, padded, mask, budgets=(16, 32)).rows
    alone = [(queries[:1], tokens[:1]), (queries[1:], tokens[1:, :40])]
    sizes = torch.stack([mha(q, c, c, need_weights=False)[0].detach().norm() for q, c in alone])
    apart = [module.fidelity(*pair, budgets=(16, 32)).rows for pair in alone]
    for row, first, second in zip(rows, *apart, strict=True):
        assert row.tokens == pytest.approx((first.tokens + second.tokens) / 2)
        assert row.share == pytest.approx(row.tokens / ((N + 40) / 2))
        off = torch.tensor([first.error, second.error]) * sizes
        assert row.error == pytest.approx(float(off.norm() / sizes.norm()), abs=1e-5)
    assert rows[-1].tokens == (N + 40) / 2 and rows[0].error > 0.01


def test_a_cross_attention_with_norms_and_feed_forward_is_measured() -> None:
    torch.manual_seed(0)
    original = CrossAttention(DIM, HEADS).eval()
    module = TreeCrossAttention.from_cross_attention(original)
    queries, tokens = rand(2, M, DIM), context()
    measured = module.fidelity(queries, tokens, budgets=(16,))
    exact = original(queries, tokens).output.detach()
    found = module(queries, module.build(tokens), budget=16).output.detach()
    assert measured.rows[0].error == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("error", "budget"), [(0.3, 8), (0.2, 8), (0.1, 16), (0.02, 64), (0.001, 64)], ids=lambda value: f"{value:g}"
)
def test_the_smallest_budget_that_keeps_the_error_is_picked(error: float, budget: int) -> None:
    assert Fidelity(readings(0.2, 0.1, 0.15, 0.0), error, 1.0).budget == budget


def test_one_path_is_picked_where_it_is_enough() -> None:
    measured = converted().fidelity(rand(2, M, DIM), context(), budgets=(None, 32), error=10)
    assert measured.budget is None and "error at most 10: one path;" in str(measured)


def test_all_tokens_are_picked_where_nothing_less_is_enough() -> None:
    measured = converted().fidelity(rand(2, M, DIM), rand(2, N, DIM, seed=1), error=1e-9)
    assert measured.budget == N and str(measured).splitlines()[-1].startswith("error at most 1e-09: all;")


def test_all_tokens_are_picked_where_errors_are_no_numbers() -> None:
    """Weights that give NaN give no error to choose by."""
    measured = Fidelity(readings(float("nan"), float("nan")), 0.05, 1.0)
    assert measured.budget == 16 and "error at most 0.05: all;" in str(measured)


def test_budgets_of_all_tokens_or_more_are_the_last_row() -> None:
    measured = converted().fidelity(rand(2, M, DIM), context(), budgets=(32, N, 1000))
    assert [row.budget for row in measured.rows] == [32, N]


@pytest.mark.parametrize(
    ("n", "branch", "expected"),
    [
        (1, 2, []),
        (20, 2, []),
        (256, 2, [32, 64, 128]),
        (4096, 2, [32, 64, 128, 256, 512, 1024]),
        (4096, 8, [64, 128, 256, 512, 1024]),
        (1_000_000, 2, [64, 128, 256, 512, 1024]),
    ],
)
def test_default_budgets_follow_the_number_of_tokens(n: int, branch: int, expected: list[int]) -> None:
    assert default_budgets(TreePlan(n, branch)) == (None, *expected)


def test_the_smallest_contexts_are_measured() -> None:
    for n in (1, 2, 3):
        measured = converted().fidelity(rand(2, M, DIM), rand(2, n, DIM))
        assert measured.rows[-1].tokens == n and measured.rows[-1].error == 0
    assert converted().fidelity(rand(1, 1, DIM), rand(1, 1, DIM)).rows[0].error < 1e-6


def test_the_table_is_aligned_and_the_json_is_plain() -> None:
    rows = (Reading(None, 13.0, 0.00317, 0.5, 0.75, 0.25), Reading(64, 63.5, 0.0155, 0.04, 0.08, 1.5))
    measured = Fidelity((*rows, Reading(4096, 4096.0, 1.0, 0.0, 0.0, 12.125)), 0.05, 3.25)
    assert str(measured).splitlines() == [
        "  budget  tokens    share   error  error 95%      ms",
        "one path      13    0.32%  0.5000     0.7500   0.250",
        "      64    63.5    1.55%  0.0400     0.0800   1.500",
        "     all   4,096  100.00%  0.0000     0.0000  12.125",
        "error at most 0.05: 64; tree built in 3.25 ms",
    ]
    plain = json.loads(json.dumps(measured.to_json()))
    assert plain["budget"] == 64 and plain["error"] == 0.05 and plain["build_ms"] == 3.25
    assert plain["rows"][0] == {
        "budget": None, "tokens": 13.0, "share": 0.00317, "error": 0.5, "error_95": 0.75, "ms": 0.25
    }  # fmt: skip


def test_times_are_medians_in_milliseconds_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []
    durations = iter([100.0, 200.0] + [0.001, 0.002] * 6 + [50.0, 60.0])  # the last round is disturbed

    def call() -> None:
        calls.append(clock[0])
        clock[0] += next(durations)

    monkeypatch.setattr("retreever.fidelity.perf_counter", lambda: clock[0])
    assert median_ms([call, call], torch.device("cpu")) == pytest.approx([1.0, 2.0])
    assert len(calls) == 16


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("budgets", 64),
        ("budgets", "64"),
        ("budgets", ()),
        ("budgets", (64, 32)),
        ("budgets", (32, 32)),
        ("budgets[1]", (32, None)),
        ("budgets[1]", (None, None)),
        ("budgets[0]", (0, 8)),
        ("budgets[1]", (None, 8.0)),
        ("budgets[0]", (True,)),
        ("error", 0),
        ("error", -0.1),
        ("error", float("nan")),
        ("error", True),
        ("error", "small"),
        ("queries", rand(2, M, DIM + 1)),
        ("queries", rand(3, M, DIM)),
        ("queries", rand(2, 0, DIM)),
        ("queries", None),
        ("context", rand(2, N, DIM + 1)),
        ("mask", torch.ones(2, N + 1, dtype=torch.bool)),
    ],
    ids=lambda value: f"{tuple(value.shape)}" if isinstance(value, Tensor) else str(value),
)
def test_wrong_arguments_are_named_in_one_line(name: str, bad: object) -> None:
    given: dict[str, Any] = {"queries": rand(2, M, DIM), "context": context()}
    with pytest.raises(InputError) as caught:
        converted().fidelity(**given | {name.partition("[")[0]: bad})
    assert str(caught.value).startswith(f"{name}: expected ") and "\n" not in str(caught.value)


@pytest.mark.gpu
def test_fidelity_on_a_gpu_is_that_of_the_cpu() -> None:
    module, queries, tokens = converted(), rand(2, M, DIM), context()
    here = module.fidelity(queries, tokens, budgets=(None, 16, 48)).rows
    there = module.cuda().fidelity(queries.cuda(), tokens.cuda(), budgets=(None, 16, 48)).rows
    for one, other in zip(here, there, strict=True):
        assert other.tokens == one.tokens and other.error == pytest.approx(one.error, abs=1e-3) and other.ms > 0
