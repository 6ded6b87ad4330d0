"""Command line options of the benchmarks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
BY_FOUR = tuple(4**power for power in range(4, 11))  # 256 to 1,048,576


@dataclass(frozen=True)
class BenchOptions:
    """Options of all benchmarks."""

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

    name: ClassVar[str]

    def run(self) -> None:
        """Print tables, write JSON, Markdown and a figure."""
        import_module(f"retreever.lab.bench.{self.name}").measure(self)


@dataclass(frozen=True)
class AttentionBench(BenchOptions):
    """Latency of one call against attention over all tokens, Perceiver IO's read-out and plain torch."""

    n: tuple[int, ...] = BY_FOUR
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
    compile: bool = False
    """Also time the modules compiled by torch.compile, with 1 and 256 queries; takes minutes."""

    name: ClassVar[str] = "attention"


@dataclass(frozen=True)
class BuildBench(BenchOptions):
    """Time to build a tree, compared with its bare matrix products."""

    n: tuple[int, ...] = ()
    """Context tokens; by default 256 to 65,536 on a CPU and to 1,048,576 elsewhere."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Heads of the aggregator."""
    branch: int = 2
    """Children per node."""

    name: ClassVar[str] = "build"


@dataclass(frozen=True)
class GrowBench(BenchOptions):
    """Time to append one token to a tree, against building it anew; a stream appended token by token."""

    n: tuple[int, ...] = ()
    """Tokens of the tree; by default 4,096, 65,536 and 1,048,576."""
    stream: int = 1_000_000
    """Length of the stream."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Attention heads, also of the aggregator."""
    branch: int = 2
    """Children per node."""

    name: ClassVar[str] = "grow"


@dataclass(frozen=True)
class MemoryBench(BenchOptions):
    """Peak memory of one inference call beyond its inputs."""

    n: tuple[int, ...] = BY_FOUR
    """Context tokens."""
    m: tuple[int, ...] = (1, 256)
    """Queries per call."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Attention heads."""

    name: ClassVar[str] = "memory"


@dataclass(frozen=True)
class TrainBench(BenchOptions):
    """Time of one training step (data, forward, backward, clipping, Adam), with and without each kernel."""

    seconds: float = 30.0
    """Longest time for one task; slow variants get fewer samples, fast ones keep theirs."""
    tasks: tuple[Literal["copy", "gp", "emnist", "activity"], ...] = ("copy", "gp", "emnist", "activity")
    """Tasks; those whose files are absent are left out."""
    n: int = 0
    """Length of the sequences of the copy task; by default 64 on a CPU and 256 elsewhere."""
    batch: int = 0
    """Examples per step; by default those of the recipe on a GPU, and fewer on a CPU."""
    compile: bool = False
    """Also time all kernels with the rest of the loss compiled by torch.compile; takes minutes."""
    precision: Literal["fp32", "tf32"] = "tf32"
    """Precision of matrix products on a GPU; training uses tf32 by default."""
    neural_processes: bool = False
    """Also time the nine neural processes, each with its kernels and in plain torch, on the tasks that have them."""
    data: Path | None = None
    """Folder that holds the datasets."""

    name: ClassVar[str] = "train"


@dataclass(frozen=True)
class EncodeBench(BenchOptions):
    """Time and memory of encoding long contexts, by encoder."""

    n: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Context points."""
    encoders: tuple[Literal["identity", "local", "transformer"], ...] = ("identity", "local", "transformer")
    """Encoders."""
    layers: int = 6
    """Layers of the encoders."""
    slowest: float = 60.0
    """A transformer is not run where it would take longer than this many seconds."""

    name: ClassVar[str] = "encode"


@dataclass(frozen=True)
class ShardedBench(BenchOptions):
    """A tree over several processes (torchrun): equal to one process, time of a call, bytes and messages."""

    n: tuple[int, ...] = (4096, 65536, 1048576)
    """Context tokens, on all processes together."""
    m: tuple[int, ...] = (1, 256)
    """Queries per call and process."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Attention heads."""
    budget: int = 40
    """Tokens to read per query, beside one path."""
    check: int = 65536
    """Contexts of at most this many tokens are compared with one process."""

    name: ClassVar[str] = "sharded"


@dataclass(frozen=True)
class ScaleBench(BenchOptions):
    """A cost model fitted to `bench sharded` and `bench attention`, and a simulation of routing."""

    results: Path = Path("benchmarks/results")
    """Folder with sharded-1-cpu.json, sharded-2-cpu.json, sharded-4-cpu.json and attention-cuda.json."""
    processes: int = 1024
    """Processes of the simulation."""
    queries: int = 256
    """Queries of every process."""
    skews: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)
    """The i-th hottest subtree is asked for i^-skew times as often; 0 is uniform."""
    dim: int = 64
    """Width of the tokens."""
    heads: int = 4
    """Attention heads."""
    seed: int = 0
    """Seed of the simulation."""

    name: ClassVar[str] = "scale"
