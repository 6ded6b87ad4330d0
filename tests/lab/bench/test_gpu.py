"""What only a CUDA device can show: graphs, events, its allocator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from retreever.lab.bench.memory import peak_bytes
from retreever.lab.bench.options import AttentionBench, BuildBench, MemoryBench, TrainBench
from retreever.lab.bench.timing import GRAPH_CALLS, Limits, time_together
from retreever.lab.bench.train import variants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_graph_leaves_the_launches_out() -> None:
    """Ten tiny kernels in a row take the device far less than Python needs to ask for them."""
    device = torch.device("cuda")
    x = torch.randn(64, device=device)

    def call() -> None:
        y = x
        for _ in range(10):
            y = y + 1

    graph, eager = (time_together({"call": [call]}, device, mode, Limits(11))["call"] for mode in ("graph", "eager"))
    assert (graph.mode, eager.mode) == ("graph", "eager") and 1 <= graph.calls <= GRAPH_CALLS
    assert 0 < graph.seconds < eager.seconds


def test_the_peak_of_a_call_is_what_it_holds_at_once() -> None:
    megabyte = 1 << 20

    def call() -> torch.Tensor:
        first = torch.empty(megabyte, dtype=torch.uint8, device="cuda")
        second = torch.empty(2 * megabyte, dtype=torch.uint8, device="cuda")
        del first
        return second

    assert peak_bytes(call, torch.device("cuda")) == 3 * megabyte


@pytest.mark.parametrize(
    ("name", "bench"),
    [
        ("attention", AttentionBench(n=(256, 1024), m=(1, 16), device="cuda", quick=True)),
        ("build", BuildBench(n=(256,), device="cuda", quick=True)),
        ("memory", MemoryBench(n=(256,), m=(16,), device="cuda", quick=True)),
        ("train", TrainBench(tasks=("copy",), n=16, batch=4, device="cuda", quick=True)),
    ],
)
def test_benchmarks_run_on_the_device(
    name: str, bench: AttentionBench | BuildBench | MemoryBench | TrainBench, tmp_path: Path
) -> None:
    from dataclasses import replace

    replace(bench, out=tmp_path).run()
    result = json.loads((tmp_path / f"{name}-cuda.json").read_text())
    assert result["machine"]["accelerator"] and result["rows"]
    if name in ("attention", "build"):
        assert {row["mode"] for row in result["rows"]} == {"graph", "eager"}
    if name == "train":
        assert {row["method"] for row in result["rows"]} == set(variants(cuda=True, compiled=False))
        assert result["summary"]["engine"]["ratio"] > 0.5
