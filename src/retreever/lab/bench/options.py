"""Command line options of the benchmarks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from retreever.lab.recipes.models import POINT_MODELS, SERIES

Shipped = Literal["gp", "emnist", "activity", "copy-256", "copy-1024"]
SHIPPED: tuple[Shipped, ...] = ("gp", "emnist", "activity", "copy-256", "copy-1024")
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
class ExportBench(BenchOptions):
    """Exported files beside PyTorch on a CPU: bytes, time of a context and of a query, largest difference."""

    models: tuple[Shipped, ...] = SHIPPED
    """Weights in the package."""
    formats: tuple[Literal["onnx", "pt2", "aoti"], ...] = ("onnx", "pt2")
    """Formats; aoti compiles for minutes, and is refused where torch compiles it wrongly."""
    n: int = 64
    """Context points, all of them real."""
    queries: int = 64
    """Queries of the call whose time is given per query, beside that of a single one."""

    name: ClassVar[str] = "export"


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
class ModelsBench(BenchOptions):
    """Time of a prediction of every model, neural processes among them, against plain torch."""

    tasks: tuple[Literal["gp", "emnist", "celeba"], ...] = ("gp", "emnist")
    """Tasks whose sizes to take; no data are needed."""
    contexts: int = 16
    """Contexts per call."""
    targets: int = 64
    """Predictions per context."""

    name: ClassVar[str] = "models"


@dataclass(frozen=True)
class RivalsBench(BenchOptions):
    """Trees against other ways to read few tokens with the same trained weights: top-k, blocks, clusters, random."""

    n: tuple[int, ...] = (4096, 65536)
    """Context points of the fields, on which attention was trained without a tree."""
    budgets: tuple[int, ...] = (40, 80, 110, 160, 228, 640)
    """Vectors read per query, beside those of one path."""
    queries: int = 256
    """Queries per call."""
    fields: int = 4
    """Fields to average over."""
    points: tuple[int, ...] = ()
    """Context points in training, stage after stage; by default 1024 on a CPU, 4096 and 65536 elsewhere."""
    steps: tuple[int, ...] = ()
    """Training steps of every stage; by default 2000 on a CPU, 8000 and 300 elsewhere."""
    weights: Path | None = None
    """File of the fields' network: read if it exists, else written after training; by default beside the results."""
    models: tuple[Shipped, ...] = SHIPPED
    """Weights in the package to read; those whose data are absent are left out."""
    batches: int = 10
    """Batches of every test set."""
    data: Path | None = None
    """Folder that holds the datasets."""

    name: ClassVar[str] = "rivals"


@dataclass(frozen=True)
class BudgetsBench(BenchOptions):
    """Score against tokens read, from one path to all leaves, with the same weights."""

    models: tuple[Shipped, ...] = SHIPPED
    """Weights in the package; those whose data are absent are left out. `--models` alone measures none of them."""
    runs: tuple[Path, ...] = ()
    """Folders of runs to measure as well."""
    checkpoint: Literal["best", "last"] = "best"
    """Which weights of the runs: those that did best on validation, or the newest."""
    factors: tuple[float, ...] = (1.25, 1.5, 2.0, 3.0, 4.0)
    """Budgets, in multiples of the tokens of one path over the largest context of the task."""
    batches: int = 0
    """Batches of every test set; 0 takes all."""
    data: Path | None = None
    """Folder that holds the datasets."""
    experiments: Path = Path("experiments")
    """Folder whose results have the scores of cross attention over all tokens."""
    add: bool = False
    """Keep the rows of other weights in the files of an earlier run."""

    name: ClassVar[str] = "budgets"


@dataclass(frozen=True)
class SeriesBench(BenchOptions):
    """All models of Human Activity: parameters, time of an epoch of training, time of an answer."""

    models: tuple[str, ...] = SERIES + POINT_MODELS
    """Models, by their names in `retreever train activity`."""
    batch: int = 64
    """Windows per training step and per call."""
    solver: Literal["fixed", "adaptive"] = "fixed"
    """Steps of latent ODEs."""
    data: Path | None = None
    """Folder that holds the datasets."""

    name: ClassVar[str] = "series"
