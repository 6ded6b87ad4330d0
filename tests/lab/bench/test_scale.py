"""Trees over processes, on this machine and on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retreever.errors import DataError
from retreever.lab.bench.options import EncodeBench, ScaleBench, ShardedBench
from retreever.lab.bench.routing import simulate
from retreever.lab.bench.scale import Costs, fit, fit_search, predict

TINY: dict[str, Any] = {"device": "cpu", "samples": 3, "seconds": 0.01}


def sharded(out: Path) -> dict[str, Any]:
    ShardedBench(out=out, n=(40, 300), m=(1, 3), dim=16, heads=2, budget=20, **TINY).run()
    return json.loads((out / "sharded-1-cpu.json").read_text())


def test_one_process_is_measured_without_torchrun(tmp_path: Path) -> None:
    rows = [row for row in sharded(tmp_path)["rows"] if row["part"] == "answer"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["us"] > 0 and row["bytes_per_query"] == 0 and row["error"] <= 1e-5 and row["other_paths"] == 0


def measured(costs: Costs) -> list[dict[str, Any]]:
    rows = []
    for processes in (1, 2, 4):
        for m in (1, 16, 256):
            for depth in (5, 11, 19):
                row = {"processes": processes, "m": m, "depth": depth, "budget": None, "messages": 5}
                row["bytes_per_query"] = 560 * (1 - 1 / processes)
                messages = 0 if processes == 1 else 5
                row["us"] = 1e6 * costs.seconds(messages, m * row["bytes_per_query"], m * 2 * depth)
                rows.append(row)
    return rows


@pytest.mark.parametrize("costs", [Costs(1e-4, 1e-9, 5e-8, 3e-4), Costs(1e-4, 0.0, 5e-8, 0.0)])
def test_the_fit_finds_the_costs_that_made_the_times(costs: Costs) -> None:
    found = fit(measured(costs))
    for name in ("message", "byte", "node", "call"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-6, abs=1e-12)
    assert found.error < 1e-6


def test_memory_falls_with_the_processes_and_bytes_do_not_grow_with_tokens() -> None:
    costs, gpu = Costs(1e-4, 1e-9, 5e-8, 3e-4), (2.0, 0.4)
    small, large = (predict(n, 1024, 64, 4, costs, gpu) for n in (10**9, 10**12))
    assert small["bytes_per_query"] == large["bytes_per_query"]
    assert large["part_bytes"] == pytest.approx(1024 * small["part_bytes"], rel=1e-6)
    assert small["ms_gpu"] < large["ms_gpu"] < 1.1 * small["ms_gpu"]
    assert predict(10**9, 64, 64, 4, costs, gpu)["part_bytes"] == pytest.approx(16 * small["part_bytes"], rel=1e-5)


def test_a_line_through_the_search_times_is_found() -> None:
    rows = [
        {"part": "operator", "method": "tree", "m": 256, "n": n, "us": 2 + 0.5 * depth}
        for n, depth in ((256, 7), (4096, 11), (65536, 15))
    ]
    assert fit_search(rows) == pytest.approx((2.0, 0.5))


def test_copies_even_out_skewed_queries() -> None:
    rows = {(row["skew"], row["copies"]): row for row in simulate(64, 64, (0.0, 1.0), 0)}
    assert rows[0.0, "none"]["busiest"] < 2 < rows[1.0, "none"]["busiest"]
    assert rows[1.0, "in proportion"]["busiest"] < rows[1.0, "hottest 8 everywhere"]["busiest"]
    assert rows[1.0, "hottest 8 everywhere"]["stay"] > 0.3 and rows[1.0, "none"]["most_subtrees"] == 1


def test_the_model_is_fitted_to_results_and_says_where_they_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"results: expected .*sharded-1-cpu.json, as a benchmark writes it"):
        ScaleBench(out=tmp_path, results=tmp_path, **TINY).run()
    ScaleBench(out=tmp_path, processes=16, queries=4, **TINY).run()
    rows = json.loads((tmp_path / "scale-cpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"paper", "routing"}
    assert "Simulated routing: 16 processes" in (tmp_path / "scale-cpu.md").read_text()


def test_encoding_is_timed_up_to_what_is_slow(tmp_path: Path) -> None:
    EncodeBench(out=tmp_path, n=(20, 4000), layers=1, slowest=1e-9, **TINY).run()
    rows = json.loads((tmp_path / "encode-cpu.json").read_text())["rows"]
    timed = {(row["n"], row["encoder"]) for row in rows if row["seconds"] is not None}
    assert timed == {(20, "identity"), (20, "local"), (20, "transformer"), (4000, "identity"), (4000, "local")}
