"""What can be set on the command line. Light on purpose: torch is loaded only once there is work to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
_BY_FOUR = tuple(4**power for power in range(4, 11))  # 256 to 1,048,576


@dataclass(frozen=True)
class BenchOptions:
    """What all benchmarks share."""

    out: Path = Path("runs/bench")
    """Folder for <name>-<device>.json, .md and .png."""
    device: str = "auto"
    """cpu, cuda or another accelerator; auto takes the accelerator where there is one."""
    dtype: DType = "auto"
    """Auto is float32 on a CPU and bfloat16 elsewhere."""
    samples: int = 101
    """Timed samples of every method in a row; the median counts."""
    seconds: float = 4.0
    """Longest time for one row; slow methods get fewer samples, fast ones keep theirs."""
    quick: bool = False
    """A small subset, in seconds."""
    overwrite: bool = False
    """Replace the files of an earlier run in the same folder."""


@dataclass(frozen=True)
class AttentionBench(BenchOptions):
    """Latency of one call against attention over all tokens, Perceiver IO's read-out and plain torch."""

    n: tuple[int, ...] = _BY_FOUR
    """Context tokens."""
    m: tuple[int, ...] = (1, 16, 256, 4096)
    """Queries per call."""
    heads: int = 4
    """Attention heads."""
    width: int = 16
    """Width of a head."""
    sets: int = 4
    """Different queries taken in turn, so that one call's tree nodes are not still in the cache for the next."""
    slowest: float = 5.0
    """Calls predicted to take longer than this many seconds are skipped."""

    def run(self) -> None:
        """Do it: print tables, write JSON, Markdown and a figure."""
        from retreever.bench.attention import run_attention

        run_attention(self)


@dataclass(frozen=True)
class BuildBench(BenchOptions):
    """Time to build a tree, beside its bare matrix products."""

    n: tuple[int, ...] = ()
    """Context tokens; by default 256 to 65,536 on a CPU and to 1,048,576 elsewhere."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Heads of the aggregator."""
    branch: int = 2
    """Children per node."""

    def run(self) -> None:
        """Do it: print tables, write JSON, Markdown and a figure."""
        from retreever.bench.build import run_build

        run_build(self)


@dataclass(frozen=True)
class MemoryBench(BenchOptions):
    """Peak memory of one inference call beyond its inputs."""

    n: tuple[int, ...] = _BY_FOUR
    """Context tokens."""
    m: tuple[int, ...] = (1, 256)
    """Queries per call."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Attention heads."""

    def run(self) -> None:
        """Do it: print a table, write JSON, Markdown and a figure."""
        from retreever.bench.memory import run_memory

        run_memory(self)


@dataclass(frozen=True)
class TrainBench(BenchOptions):
    """Time of one training step (data, forward, backward, clipping, Adam) on the copy task."""

    seconds: float = 30.0
    """Longest time for one row; slow methods get fewer samples, fast ones keep theirs."""
    n: tuple[int, ...] = ()
    """Lengths of the sequences; by default 64 on a CPU, 256 and 1,024 elsewhere."""
    batch: int = 0
    """Sequences per step; by default 64 on a CPU and 128 elsewhere."""
    compile: bool = False
    """On a GPU also time the graph of the compiled model."""
    precision: Literal["fp32", "tf32"] = "tf32"
    """Of matrix products on a GPU; tf32 is what training uses unless told otherwise."""

    def run(self) -> None:
        """Do it: print a table, write JSON, Markdown and a figure."""
        from retreever.bench.train import run_train

        run_train(self)


@dataclass(frozen=True)
class DataBench(BenchOptions):
    """How fast every task makes batches, against the training step of the fastest model; at least 3x is wanted."""

    seconds: float = 30.0
    """Longest time for one task; slow methods get fewer samples, fast ones keep theirs."""
    batch: int = 0
    """Examples per batch; by default those of the task's recipe."""
    data: Path | None = None
    """Folder that holds the datasets; tasks whose files are absent are left out."""

    def run(self) -> None:
        """Do it: print a table, write JSON, Markdown and a figure."""
        from retreever.bench.data import run_data

        run_data(self)
