"""Command line options of the benchmarks of models and of weights in the package. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from retreever.lab.bench.options import BenchOptions
from retreever.lab.recipes.models import POINT_MODELS, SERIES

Shipped = Literal["gp", "emnist", "activity", "copy-256", "copy-1024"]
SHIPPED: tuple[Shipped, ...] = get_args(Shipped)
Jobs = Literal["fields-512", "fields-4096", "fields-65536", "nearest", "co2", "digits", "photo"]
JOBS: tuple[Jobs, ...] = get_args(Jobs)
Methods = Literal[
    "all tokens", "Perceiver IO", "tree from scratch", "tree, nodes trained", "wide tree, all trained",
    "gp weights, tuned",
]  # fmt: skip
METHODS: tuple[Methods, ...] = get_args(Methods)


@dataclass(frozen=True)
class ExportBench(BenchOptions):
    """Exported files beside PyTorch on a CPU: bytes, time of a context and of a query, largest difference."""

    models: tuple[Shipped, ...] = SHIPPED
    """Weights in the package."""
    formats: tuple[Literal["onnx", "pt2", "aoti"], ...] = ("onnx", "pt2")
    """Formats; aoti compiles for about a minute a model, with a C++ compiler."""
    n: int = 64
    """Context points, all of them real."""
    queries: int = 64
    """Queries of the call whose time is given per query, beside that of a single one."""

    name: ClassVar[str] = "export"


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
    """Models, by their names in `retreever train activity`; grud-512 is one as wide as that."""
    batch: int = 64
    """Windows per training step and per call."""
    solver: Literal["fixed", "adaptive"] = "fixed"
    """Steps of latent ODEs."""
    data: Path | None = None
    """Folder that holds the datasets."""

    name: ClassVar[str] = "series"


@dataclass(frozen=True)
class OptimiseBench(BenchOptions):
    """Bayesian optimisation in one dimension: evaluations that models and Gaussian processes need."""

    functions: int = 100
    """Functions of every kernel."""
    steps: int = 45
    """Steps after the first, random point."""
    kernels: tuple[Literal["rbf", "matern", "periodic"], ...] = ("rbf", "matern", "periodic")
    """Kernels of the functions; the weights in the package were trained on rbf."""
    runs: tuple[Path, ...] = ()
    """Folders of runs of GP regression to compare as well."""

    name: ClassVar[str] = "optimise"


@dataclass(frozen=True)
class BanditBench(BenchOptions):
    """The wheel bandit: regret of trained models, in % of uniform play."""

    runs: tuple[Path, ...] = ()
    """Folders of runs of the wheel task (retreever train wheel)."""
    deltas: tuple[float, ...] = (0.7, 0.9, 0.95, 0.99, 0.995)
    """Radii outside of which the arm of a quadrant pays most."""
    steps: int = 2000
    """Arms every player plays."""
    players: int = 50
    """Players of every model; they see the same contexts in different orders."""
    window: int = 512
    """Plays a model is given, the last ones; as many as it was trained with. 0 gives all."""
    budget: int | None = None
    """Let trees play a second time with so many tokens per query, and attention over all tokens converted to a tree."""

    name: ClassVar[str] = "bandit"


@dataclass(frozen=True)
class JobsBench(BenchOptions):
    """Real jobs: trees, attention over all tokens and Perceiver IO trained for the same time, and the usual answer."""

    seconds: float = 150.0
    """Seconds of training of every method."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to average over."""
    only: tuple[Jobs, ...] = ()
    """Jobs to run; all by default. Those whose data are absent are left out."""
    methods: tuple[Methods, ...] = ()
    """Methods to train; all by default. "all tokens" is also read through trees of means."""
    resume: bool = False
    """Keep the rows of an earlier run in the same folder, and train what is missing."""

    name: ClassVar[str] = "jobs"


@dataclass(frozen=True)
class StepsBench(BenchOptions):
    """Time of a training step on long contexts: attention over all tokens, and the ways to train a tree."""

    seconds: float = 60.0
    """Longest time for one row; slow methods get fewer samples, fast ones keep theirs."""
    n: tuple[int, ...] = (512, 4096, 65536)
    """Context points."""
    queries: int = 64
    """Queries of a step."""
    contexts: int = 1
    """Contexts of a step."""
    dim: int = 32
    """Width of the tokens; layers in between are twice as wide."""

    name: ClassVar[str] = "steps"
