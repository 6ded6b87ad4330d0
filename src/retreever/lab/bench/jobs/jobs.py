"""The jobs of `retreever bench jobs`: what is asked, how it is scored, and the usual answer without a network."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution

from retreever.batch import Batch
from retreever.errors import BackendError
from retreever.lab.bench.rivals.fields import draw_fields
from retreever.nn.heads import log_likelihood
from retreever.tasks.seeds import stream

Found = Tensor | Distribution  # predictions (b, m, out), or classes (b, m)
Answer = Callable[[Batch], Found]
AT_ONCE, PART = 16_384, 4_096  # points of a training batch; points of most training fields where a field has more


class Job(ABC):
    """A job: random training batches, fixed test batches, settings of the models, a score.

    Attributes:
        name: as in `--only`.
        score: what is measured.
        smaller: whether a smaller score is better.
        batch: tasks per training batch.
        fields: settings of the models.
        budget: share of the tokens that the tree may read in its middle row.
        rate: largest learning rate.
        unit: what a value of 1 stands for.
        densities: whether the likelihood of predictions is given, too.
    """

    name: str
    score: ClassVar[str] = "RMSE"
    smaller: ClassVar[bool] = True
    batch: int = 8
    fields: dict[str, Any]
    budget: float = 0.1
    rate: float = 2e-3
    unit: float = 1.0
    densities: ClassVar[bool] = False

    @abstractmethod
    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Fresh tasks, of the part of the data for training or for testing."""

    @abstractmethod
    def usual(self) -> dict[str, Answer]:
        """Answers without a network."""

    def draws(self, seed: int, device: torch.device) -> torch.Generator:
        """The stream of random training data: on the CPU, unless a job makes its data on the device."""
        return torch.Generator().manual_seed(seed)

    def tests(self, count: int = 4) -> list[Batch]:
        """The test batches, the same in every run."""
        return [self.sample(2, stream(f"jobs-{self.name}", "test", index), test=True) for index in range(count)]

    def value(self, dist: Distribution) -> Tensor:
        """What is scored of a prediction."""
        return dist.mean

    def error(self, found: Tensor, batch: Batch) -> tuple[float, int]:
        """Sum of squared errors over real targets, and how many there are."""
        squares = (found - batch.yt).square().mean(dim=-1)[_real(batch)]
        return float(squares.sum()), squares.numel()

    def total(self, parts: list[tuple[float, int]]) -> float:
        """The score of all test batches."""
        return self.unit * math.sqrt(sum(part for part, _ in parts) / sum(count for _, count in parts))

    def judged(self, found: Sequence[Found], tests: Sequence[Batch]) -> dict[str, float]:
        """The score of the answers to all test batches, and the mean log-likelihood of a target where it is wanted."""
        values = [self.value(one) if isinstance(one, Distribution) else one for one in found]
        errors = [self.error(value.cpu(), batch) for value, batch in zip(values, tests, strict=True)]
        judged = {"score": self.total(errors)}
        dists = [(one, batch) for one, batch in zip(found, tests, strict=True) if isinstance(one, Distribution)]
        if self.densities and dists:
            parts = [log_likelihood(dist, batch.yt.to(dist.mean))[_real(batch)] for dist, batch in dists]
            judged["likelihood"] = float(torch.cat(parts).mean()) - math.log(self.unit)
        return judged


def _real(batch: Batch) -> Bool[Tensor, "b m"]:
    """Which targets are real."""
    return torch.ones(batch.xt.shape[:2], dtype=torch.bool) if batch.target_mask is None else batch.target_mask


class Classes(Job):
    """A job whose targets are classes, scored by accuracy."""

    score, smaller = "accuracy %", False

    def value(self, dist: Distribution) -> Tensor:
        """The most likely class."""
        logits: Tensor = dist.logits  # type: ignore[attr-defined]
        return logits.argmax(dim=-1)

    def error(self, found: Tensor, batch: Batch) -> tuple[float, int]:
        """How many are right, and how many there are."""
        return float((found == batch.yt).sum()), batch.yt.numel()

    def total(self, parts: list[tuple[float, int]]) -> float:
        """Accuracy in %."""
        return 100 * sum(part for part, _ in parts) / sum(count for _, count in parts)


class Field(Job):
    """A noisy 2-D field: the value without noise at 64 places, from n points.

    Seven of eight training batches of a larger field have 4,096 points.
    """

    def __init__(self, n: int) -> None:
        self.name, self.n = f"fields-{n}", n
        self.batch = max(1, min(8, AT_ONCE // n))
        self.budget = 0.1 if n <= 1024 else 0.02
        self.fields = {"dim_x": 2, "dim": 32, "hidden": 64, "encoder": "identity", "head": "point", "waves": 32}
        self.fields |= {"frequency": 9.0}

    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Fresh fields."""
        n, device = self.n, generator.device
        if n > PART and not test and torch.rand((), generator=generator, device=device) < 7 / 8:
            size, n = AT_ONCE // PART, PART
        return Batch(*draw_fields(size, n, 64, generator, device))

    def draws(self, seed: int, device: torch.device) -> torch.Generator:
        """On the device: drawing thousands of points takes a CPU longer than a GPU takes for the step."""
        return torch.Generator(device).manual_seed(seed)

    def usual(self) -> dict[str, Answer]:
        """The mean of the nearest points, as many as did best on training fields."""
        return {"k nearest neighbours": best_neighbours(self)}


class Nearest(Classes):
    """The class of the nearest of 256 points."""

    name, budget = "nearest", 0.1
    rate = 1e-3  # with twice as much attention stays at chance

    def __init__(self, n: int = 256, classes: int = 4) -> None:
        self.n, self.classes = n, classes
        self.fields = {"dim_x": 2, "dim_y": classes, "outputs": classes, "dim": 32, "hidden": 64, "encoder": "identity"}
        self.fields |= {"head": "categorical", "waves": 16, "frequency": 1.5}

    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Points with classes."""
        x, xt = (2 * torch.rand(size, count, 2, generator=generator) - 1 for count in (self.n, 64))
        labels = torch.randint(self.classes, (size, self.n), generator=generator)
        nearest = torch.cdist(xt, x).argmin(dim=-1)
        return Batch(x, torch.nn.functional.one_hot(labels, self.classes).float(), xt, labels.gather(1, nearest))

    def usual(self) -> dict[str, Answer]:
        """The definition itself."""

        def exact(batch: Batch) -> Tensor:
            return batch.yc.argmax(dim=-1).gather(1, torch.cdist(batch.xt, batch.xc).argmin(dim=-1))

        return {"nearest neighbour": exact}


class Digits(Classes):
    """Digits of scikit-learn as sets of their 64 pixels; 1,297 for training, 500 for testing."""

    name, budget, rate = "digits", 0.3, 1e-3

    def __init__(self) -> None:
        images, labels = sklearn_data("load_digits", return_X_y=True)
        self.images, self.labels = torch.tensor(images).float() / 16, torch.tensor(labels)
        places = torch.cartesian_prod(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8))
        self.places, self.batch = places, 32
        self.fields = {"dim_x": 2, "outputs": 10, "dim": 32, "hidden": 64, "layers": 2, "head": "categorical"}

    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Images; the only query has no place of its own."""
        which = torch.randint(*((1297, 1797) if test else (0, 1297)), (size,), generator=generator)
        return self._batch(which)

    def tests(self, count: int = 4) -> list[Batch]:
        """All test images."""
        return list(map(self._batch, torch.split(torch.arange(1297, 1797), 125)))

    def _batch(self, which: Tensor) -> Batch:
        places = self.places.expand(len(which), -1, -1)
        return Batch(places, self.images[which, :, None], torch.zeros(len(which), 1, 2), self.labels[which, None])

    def usual(self) -> dict[str, Answer]:
        """The class of the three most similar training images."""

        def neighbours(batch: Batch) -> Tensor:
            near = torch.cdist(batch.yc[..., 0], self.images[:1297]).topk(3, largest=False).indices
            return self.labels[:1297][near].mode(dim=-1).values[:, None]

        return {"3 nearest neighbours": neighbours}


class Photo(Job):
    """A photograph of scikit-learn: the colours of 256 pixels of a crop, from 512 others; left half for training."""

    name, budget, side = "photo", 0.1, 64

    def __init__(self) -> None:
        image = sklearn_data("load_sample_image", "china.jpg")
        self.image = torch.tensor(image.copy()).float() / 127.5 - 1
        self.fields = {"dim_x": 2, "dim_y": 3, "dim": 32, "hidden": 64, "encoder": "identity", "head": "point"}
        self.fields |= {"waves": 32, "frequency": 15.0}

    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Crops of 64 x 64 pixels."""
        height, width = self.image.shape[:2]
        first, last = (width // 2, width - self.side) if test else (0, width // 2 - self.side)
        crops = []
        for _ in range(size):
            top = int(torch.randint(height - self.side, (), generator=generator))
            left = int(torch.randint(first, last, (), generator=generator))
            pixels = torch.randperm(self.side**2, generator=generator)[: 512 + 256]
            row, column = pixels // self.side, pixels % self.side
            crops.append(torch.cat([torch.stack([row, column], 1) / (self.side / 2) - 1,
                                    self.image[top + row, left + column]], dim=1))  # fmt: skip
        points = torch.stack(crops)
        return Batch(points[:, :512, :2], points[:, :512, 2:], points[:, 512:, :2], points[:, 512:, 2:])

    def usual(self) -> dict[str, Answer]:
        """The mean of the nearest pixels, as many as did best on the left half."""
        return {"k nearest neighbours": best_neighbours(self)}


def sklearn_data(loader: str, *arguments: Any, **named: Any) -> Any:
    """Data that come with scikit-learn."""
    try:
        from sklearn import datasets
    except ImportError:
        raise BackendError("scikit-learn: expected the package, got none (pip install scikit-learn)") from None
    return getattr(datasets, loader)(*arguments, **named)


def neighbours(batch: Batch, k: int) -> Float[Tensor, "b m dy"]:
    """Mean of the values of the k nearest context points, weighted by a kernel as wide as the farthest of them."""
    distance, index = torch.cdist(batch.xt, batch.xc).topk(k, largest=False)
    weight = (1 - (distance / (1.001 * distance[..., -1:] + 1e-9)).square()).clamp_min(1e-3)
    values = batch.yc.gather(1, index.flatten(1)[..., None].expand(-1, -1, batch.yc.shape[-1]))
    values = values.view(*index.shape, -1)
    return (weight[..., None] * values).sum(dim=2) / weight.sum(dim=2)[..., None]


def best_neighbours(job: Job) -> Answer:
    """`neighbours` with the number that is best on training data."""
    tasks = job.sample(4, torch.Generator().manual_seed(0))
    best = min((2, 4, 8, 16, 32, 64), key=lambda k: job.error(neighbours(tasks, k), tasks)[0])
    return lambda batch: neighbours(batch, best)
