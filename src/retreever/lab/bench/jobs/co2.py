"""CO2 at Mauna Loa, weekly, from a file of statsmodels: fill a gap of 4 to 20 weeks in a window of two years."""

from __future__ import annotations

import csv
import importlib.util
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from retreever.batch import Batch
from retreever.errors import BackendError
from retreever.lab.bench.jobs.jobs import Answer, Job

WEEKS, PPM, YEAR = 104, 2.0, 52.18  # of a window; ppm that count as 1; weeks
FAR = 2.0  # a window lies between -FAR and FAR, as the functions that the gp weights were trained on


class Gaps(Job):
    """Windows of two years; before 1992 for training, after it for testing. Values are in units of 2 ppm."""

    name, budget, unit, densities = "co2", 0.3, PPM, True
    rate = 1e-3  # with twice as much half of the runs predict the mean of the window

    def __init__(self) -> None:
        self.series = read_co2()
        self.split, self.batch = int(0.78 * len(self.series)), 16
        self.fields = {"dim": 64, "hidden": 128, "layers": 2}

    def sample(self, size: int, generator: torch.Generator, test: bool = False) -> Batch:
        """Windows with a gap, of 12 weeks in the middle for testing."""
        first, last = (self.split, len(self.series) - WEEKS) if test else (0, self.split - WEEKS)
        starts = torch.randint(first, last, (size,), generator=generator)
        gap = torch.full((size,), 12) if test else torch.randint(4, 21, (size,), generator=generator)
        place = torch.full((size,), 46) if test else (torch.rand(size, generator=generator) * (WEEKS - gap)).long()
        return gaps(self.series, starts, place, gap)

    def tests(self, count: int = 4) -> list[Batch]:
        """Forty windows, evenly over the years after 1991."""
        starts = torch.linspace(self.split, len(self.series) - WEEKS - 1, 40).long()
        return [
            gaps(self.series, part, torch.full((10,), 46), torch.full((10,), 12)) for part in torch.split(starts, 10)
        ]

    def usual(self) -> dict[str, Answer]:
        """A straight line, and a Gaussian process, smooth plus yearly, fitted to training years."""
        fitted = fit_kernel(self.sample(8, torch.Generator().manual_seed(1)))
        return {"straight line": line, "Gaussian process": lambda batch: posterior(batch, fitted)[0]}


def read_co2() -> Tensor:
    """ppm of every week, NaN where missing."""
    spec = importlib.util.find_spec("statsmodels")
    if spec is None or not spec.submodule_search_locations:
        raise BackendError("statsmodels: expected the package, got none (pip install statsmodels)")
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "co2" / "co2.csv"
    with file.open(encoding="utf-8") as lines:
        return torch.tensor([float(row[1]) if row[1] else math.nan for row in list(csv.reader(lines))[1:]])


def gaps(series: Tensor, starts: Tensor, place: Tensor, gap: Tensor) -> Batch:
    """Windows whose weeks outside the gap are context and inside it targets, where they are known."""
    weeks = torch.arange(WEEKS)
    window = series[starts[:, None] + weeks]
    hidden = (weeks >= place[:, None]) & (weeks < (place + gap)[:, None])
    known = ~window.isnan()
    seen, asked = known & ~hidden, known & hidden
    asked[:, 0] |= ~asked.any(dim=1)  # a gap without a known week: any target
    level = window.masked_fill(~seen, 0).sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True)
    x = (FAR * (2 * weeks / WEEKS - 1)).expand(len(starts), -1)[..., None]
    y = ((window - level) / PPM).nan_to_num()[..., None]
    return Batch(x, y, x, y, context_mask=seen, target_mask=asked)


def line(batch: Batch) -> Tensor:
    """Linear interpolation between the nearest weeks seen."""
    assert batch.context_mask is not None
    answers = []
    for x, y, seen, at in zip(batch.xc[..., 0], batch.yc[..., 0], batch.context_mask, batch.xt[..., 0], strict=True):
        known, values = x[seen], y[seen]
        right = torch.searchsorted(known, at.contiguous()).clamp(1, len(known) - 1)
        share = ((at - known[right - 1]) / (known[right] - known[right - 1])).clamp(0, 1)
        answers.append(values[right - 1] + share * (values[right] - values[right - 1]))
    return torch.stack(answers)[..., None]


def kernel(a: Tensor, b: Tensor, log: Tensor) -> Tensor:
    """Smooth plus yearly: s1 exp(-d^2 / 2 l1^2) + s2 exp(-2 sin^2(pi d) / l2^2), with d in years."""
    d = (a[..., :, None] - b[..., None, :]) * WEEKS / (2 * FAR * YEAR)
    s1, l1, s2, l2, _ = log.exp()
    return s1 * torch.exp(-0.5 * (d / l1) ** 2) + s2 * torch.exp(-2 * (torch.sin(math.pi * d) / l2) ** 2)


def posterior(batch: Batch, log: Tensor) -> tuple[Distribution, Tensor]:
    """Predictions of observations at all weeks (b, m, 1), and the log marginal likelihood of what was seen, summed."""
    assert batch.context_mask is not None
    means, variances, evidence = [], [], torch.zeros((), dtype=torch.float64)
    for x, y, seen, at in zip(batch.xc[..., 0], batch.yc[..., 0], batch.context_mask, batch.xt[..., 0], strict=True):
        known, values, asked = x[seen].double(), y[seen, None].double(), at.double()
        noise = log[-1].exp() + 1e-6
        factor = torch.linalg.cholesky(kernel(known, known, log) + noise * torch.eye(len(known), dtype=torch.float64))
        white, cross = (
            torch.linalg.solve_triangular(factor, part, upper=False) for part in (values, kernel(known, asked, log))
        )
        means.append(cross.mT @ white)
        prior = kernel(asked[:1], asked[:1], log)[0]
        variances.append((prior + noise - cross.square().sum(dim=0))[:, None])
        evidence = evidence - 0.5 * white.square().sum() - factor.diagonal().log().sum()
    mean, variance = torch.stack(means).float(), torch.stack(variances).float()
    return Independent(Normal(mean, variance.sqrt(), validate_args=False), 1, validate_args=False), evidence


def fit_kernel(batch: Batch, steps: int = 40) -> Tensor:
    """Log hyperparameters that make the windows of a batch most likely."""
    log = torch.tensor([0.0, -0.7, 0.7, 0.0, -3.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([log], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.autograd.backward(-posterior(batch, log)[1])
        optimiser.step()
    return log.detach()
