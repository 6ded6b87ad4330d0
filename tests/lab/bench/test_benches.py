"""Each benchmark runs from options to files and measures what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever.attention import TreeCrossAttention
from retreever.errors import InputError
from retreever.lab.bench import attention
from retreever.lab.bench.attention import (
    Part,
    compiled_methods,
    compiled_rows,
    latency_rows,
    module_methods,
    operator_methods,
    operator_table,
)
from retreever.lab.bench.build import build_rows, matrix_products
from retreever.lab.bench.figures import BUDGET, BUILD, FULL, PERCEIVER, PRODUCTS, REFERENCE, TREE
from retreever.lab.bench.memory import growth, peak_bytes
from retreever.lab.bench.options import AttentionBench, BenchOptions, BuildBench, GrowBench, MemoryBench, TrainBench
from retreever.lab.bench.options_models import ModelsBench, StepsBench
from retreever.lab.bench.paper import PUBLISHED
from retreever.lab.bench.report import Run
from retreever.lab.bench.timing import Timing
from retreever.lab.bench.train import CROSS, PLAIN, SEARCH, set_impl, variants
from retreever.models.retreever import ReTreever
from retreever.tree.plan import TreePlan

TINY: dict[str, Any] = {"device": "cpu", "samples": 3, "seconds": 0.01}
BENCHES: dict[str, Callable[[Path], BenchOptions]] = {
    "attention": lambda out: AttentionBench(out=out, n=(8, 32), m=(1, 3), quick=True, **TINY),
    "build": lambda out: BuildBench(out=out, n=(9, 32), dim=8, heads=2, **TINY),
    "grow": lambda out: GrowBench(out=out, n=(9, 32), stream=70, dim=8, heads=2, **TINY),
    "memory": lambda out: MemoryBench(out=out, n=(8, 32), m=(2,), dim=8, heads=2, **TINY),
    "models": lambda out: ModelsBench(out=out, tasks=("gp",), contexts=2, targets=3, quick=True, **TINY),
    "steps": lambda out: StepsBench(out=out, n=(32, 9), queries=3, dim=8, **TINY),
    "train": lambda out: TrainBench(out=out, tasks=("copy", "emnist"), n=8, batch=2, data=out / "none", **TINY),
}


@pytest.fixture(scope="module", params=BENCHES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one benchmark, once all its files have been seen."""
    out = tmp_path_factory.mktemp(request.param)
    BENCHES[request.param](out).run()  # type: ignore[attr-defined]
    files = {ending: out / f"{request.param}-cpu.{ending}" for ending in ("json", "md", "png")}
    assert sorted(out.iterdir()) == sorted(files.values())
    assert files["md"].read_text().startswith("**")
    return json.loads(files["json"].read_text())


def test_every_benchmark_says_what_was_asked_and_found(result: dict[str, Any]) -> None:
    rows, options = result["rows"], result["options"]
    by_task = {"train": "copy", "models": "gp"}.get(result["benchmark"])
    sizes = {row["task"] for row in rows} if by_task else {row["n"] for row in rows}
    assert sizes >= ({by_task} if by_task else set(options["n"])) and options["samples"] == 3
    kind = "bytes" if result["benchmark"] == "memory" else "us"
    assert all(row[kind] > 0 for row in rows)
    if result["benchmark"] == "train":  # a task without files is left out and named
        assert sizes == {"copy"} and "emnist: expected" in result["summary"]["failed"]["emnist"]


def test_every_benchmark_covers_its_methods(result: dict[str, Any]) -> None:
    methods = {row["method"] for row in result["rows"]}
    expected = {
        "attention": {TREE, BUDGET, FULL, PERCEIVER, REFERENCE, "TCA, branch 2", "Perceiver IO read-out"},
        "build": {BUILD, PRODUCTS, "layout", "aggregation"},
        "grow": {"append", "append, means", "rebuild", "rebuild, means", "fold", "fold, means", "encode again"},
        "memory": {TREE, "all tokens, cached", "all tokens, raw"},
        "models": {"predict", "answer", "predict, plain torch"},
        "steps": {"all tokens", "tree from scratch", "nodes of a tree", "nodes of a tree of 8"},
        "train": {CROSS, PLAIN, SEARCH},
    }
    assert methods >= expected[result["benchmark"]]


def test_sizes_and_results_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^n: expected"):
        AttentionBench(out=tmp_path, n=()).run()
    with pytest.raises(InputError, match=r"^heads: expected"):
        AttentionBench(out=tmp_path, heads=0).run()
    with pytest.raises(InputError, match=r"^m: expected"):
        MemoryBench(out=tmp_path, m=(0,)).run()
    (tmp_path / "build-cpu.json").write_text("{}")
    with pytest.raises(InputError, match=r"^out: expected no earlier results"):
        BuildBench(out=tmp_path, device="cpu").run()


def tiny_run(out: Path, **others: Any) -> tuple[Run, AttentionBench]:
    options = AttentionBench(out=out, **TINY | others)
    return Run.start("attention", options), options


def test_calls_predicted_to_be_slow_are_skipped_and_say_so(tmp_path: Path) -> None:
    run, options = tiny_run(tmp_path, n=(8, 64), m=(1,), slowest=0.0)
    with torch.inference_mode():
        rows = list(latency_rows(run, options, Part("operator", "auto", operator_methods)))
    assert {row["n"] for row in rows if row.get("skipped")} == {64}
    assert all("us" in row for row in rows if row["n"] == 8)
    table = operator_table(run, options, rows)
    assert table.rows[1][3:] == ("skipped", None, "skipped", None, "skipped", "skipped", "skipped")
    assert any("skipped" in note for note in table.notes)


@pytest.mark.parametrize(("slowest", "skipped"), [(0.7, [64]), (0.9, [])])
def test_a_forecast_scales_with_the_work(
    slowest: float, skipped: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.1 s for 100 queries over 8 tokens follow 0.8 s over 64; one query, timed in between, says less."""
    run, options = tiny_run(tmp_path, n=(8, 64), m=(100, 1), slowest=slowest)
    timing = Timing(0.1, 0.1, 0.1, samples=1, calls=1, mode="eager")
    monkeypatch.setattr(attention, "time_together", lambda methods, *_: dict.fromkeys(methods, timing))
    rows = latency_rows(run, options, Part("operator", "eager", lambda *_: lambda m: {FULL: [lambda: None]}))
    assert [row["n"] for row in rows if row.get("skipped")] == skipped


def test_all_operator_methods_read_what_they_should(tmp_path: Path) -> None:
    """The two tree searches agree, the others have the shape of their keys."""
    run, options = tiny_run(tmp_path, heads=2, width=4, sets=2)
    with torch.inference_mode():
        methods = operator_methods(run, options, TreePlan(32, 2))(3)
        results: dict[str, Any] = {name: [call() for call in calls] for name, calls in methods.items()}
    assert {name: len(found) for name, found in results.items()} == dict.fromkeys(methods, 2)
    for fast, plain in zip(results[TREE], results[REFERENCE], strict=True):
        torch.testing.assert_close(fast.output, plain.output)
    assert not torch.equal(results[TREE][0].output, results[TREE][1].output)
    assert results[FULL][0].shape == results[PERCEIVER][0].shape == (1, 2, 3, 4)


def test_a_budget_is_timed_beside_one_path(tmp_path: Path) -> None:
    """Four times the tokens: 24 of 32."""
    run, options = tiny_run(tmp_path, n=(32,), m=(3,), heads=2, width=4)
    with torch.inference_mode():
        rows = list(latency_rows(run, options, Part("module", "eager", module_methods)))
        methods = module_methods(run, options, TreePlan(32, 2))(3)
        found: dict[str, Any] = {name: calls[0]() for name, calls in methods.items()}
    assert {row["method"]: row["tokens"] for row in rows} == {TREE: 6, BUDGET: 24, FULL: 32}
    assert found[TREE].tokens == 6 and int(found[BUDGET].tokens_read.max()) == 24 and found[FULL].tokens == 32


def test_modules_are_also_timed_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls; what a compiler cannot do costs none of the other rows."""
    run, options = tiny_run(tmp_path, n=(8,), m=(2,), heads=2, width=4, sets=1)
    modes: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda module, **settings: modes.append(settings["mode"]) or module)
    with torch.inference_mode():
        torch.manual_seed(0)
        plain = module_methods(run, options, TreePlan(8, 2))(2)
        torch.manual_seed(0)
        for name, calls in compiled_methods(run, options, TreePlan(8, 2))(2).items():
            assert torch.equal(calls[0]().output, plain[name][0]().output), name  # type: ignore[attr-defined]
        assert modes == ["default"] * 3
        monkeypatch.setattr(torch, "compile", lambda *_, **__: 1 / 0)
        failed: dict[str, str] = {}
        assert compiled_rows(run, options, failed) == [] and "ZeroDivisionError" in failed["compiled module"]


def test_the_paper_is_quoted_right() -> None:
    """Tokens of its branching factors, in per cent, and its two slowdowns."""
    percent = {branch: round(100 * TreePlan(256, branch).tokens / 256, 1) for branch in (2, 8, 16, 32, 256)}
    assert percent == {2: 3.5, 8: 7.0, 16: 12.1, 32: 15.2, 256: 100.0}
    tree, full = PUBLISHED["TCA, branch 2"], PUBLISHED["Cross Attention"]
    assert round(tree.cpu / full.cpu, 1) == 1.6 and round(tree.gpu / full.gpu, 1) == 5.6


def test_bare_products_are_those_of_the_linear_layers(tmp_path: Path) -> None:
    """32 tokens of width 8: 32 + 16 + 8 + 4 rows pass the aggregator, all 62 nodes become keys and values."""
    from torch.utils.flop_counter import FlopCounterMode

    run, _ = tiny_run(tmp_path)
    multiply = matrix_products(run, TreeCrossAttention(8, 2, branch=2).eval(), TreePlan(32, 2))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        multiply()
    query, key_value, out, up, down = 8 * 8, 8 * 16, 8 * 8, 8 * 32, 16 * 8
    assert counter.get_total_flops() == 2 * (60 * (query + key_value + out + up + down) + 62 * key_value)


def test_a_context_that_fits_one_block_can_be_built(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path)
    with torch.inference_mode():
        rows = build_rows(run, TreeCrossAttention(8, 2).eval(), 2, "eager")
    assert [row["method"] for row in rows] == [BUILD, PRODUCTS]


def test_the_peak_of_a_call_is_what_it_holds_at_once() -> None:
    megabyte = 1 << 20

    def call() -> torch.Tensor:
        first = torch.empty(megabyte, dtype=torch.uint8)
        second = torch.empty(2 * megabyte, dtype=torch.uint8)
        del first
        third = torch.empty(megabyte // 2, dtype=torch.uint8)
        del third
        return second

    assert peak_bytes(call, torch.device("cpu")) == 3 * megabyte
    assert peak_bytes(lambda: None, torch.device("cpu")) == 0


def test_growth_is_taken_between_the_sizes_named() -> None:
    rows = [{"n": n, "m": 1, "method": TREE, "bytes": n + 100} for n in (4, 100, 300, 900)]
    assert growth(rows, 1, TREE, small=100, large=300) == {
        "method": TREE, "m": 1, "from": 100, "to": 300, "factor": 2.0,
    }  # fmt: skip
    assert growth(rows, 1, TREE, small=5000, large=6000)["to"] == 900


def test_every_kernel_has_its_line() -> None:
    """On CUDA the search alone, and with the attention kernel; all kernels also compiled."""
    names = variants(cuda=True, compiled=True)
    assert len(names) == 5 and names["tree, search kernel"].without == ("attention", "aggregate")
    assert names["tree, all kernels, compiled"].compiled and names["tree, plain torch"].impl == "reference"
    assert list(variants(cuda=False, compiled=False)) == [CROSS, PLAIN, SEARCH]


def test_plain_torch_reaches_every_layer() -> None:
    model = ReTreever(dim=16, layers=1, hidden=16)
    set_impl(model, "reference")
    found = {module.impl for module in model.modules() if hasattr(module, "impl")}
    assert found == {"reference"}
