"""Fill gaps in a real series: weekly CO2 at Mauna Loa, 1958 to 2001, of which 59 weeks are missing.

    pip install statsmodels matplotlib      # the data come with statsmodels; only its file is read
    python examples/fill_gaps.py --steps 1000 --out co2.png

Models train on windows of two years before 1992 in which a gap of 4 to 20 weeks is hidden, and fill gaps of 12 weeks in
windows after it. They are compared with a straight line across the gap and with a Gaussian process (smooth plus yearly)
whose hyperparameters are fitted to the training years.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
from pathlib import Path

import torch
from torch import Tensor

from retreever import GRUD, Batch, IPNets, MTANDEnc, ReTreever, context_of
from retreever.train import fit
from retreever.train.config import TrainConfig

WEEKS, SCALE = 104, 2.0  # of a window; ppm that count as 1
SIZES = {"hidden": 64, "dim": 32, "dropout": 0.0}
MODELS = {
    "GRU-D": lambda: GRUD(**SIZES),
    "IP-Nets": lambda: IPNets(**SIZES),
    "mTAND-Enc": lambda: MTANDEnc(**SIZES, frequency=20.0),
    "ReTreever": lambda: ReTreever(dim_y=2, outputs=1, dim=32, layers=2, hidden=64, order="given"),
}


def read_co2() -> Tensor:
    """ppm of every week, NaN where missing."""
    spec = importlib.util.find_spec("statsmodels")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this example reads a file of statsmodels: pip install statsmodels")
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "co2" / "co2.csv"
    rows = list(csv.reader(file.open(encoding="utf-8")))[1:]
    return torch.tensor([float(row[1]) if row[1] else math.nan for row in rows])


def batch_of(ppm: Tensor, starts: Tensor, gap_start: Tensor, gap: Tensor) -> Batch:
    """Windows with a gap: the rest is context, the known weeks in the gap are targets; times are in windows."""
    weeks = torch.arange(WEEKS)
    window = ppm[starts[:, None] + weeks]
    hidden = (weeks >= gap_start[:, None]) & (weeks < (gap_start + gap)[:, None])
    seen = ~window.isnan() & ~hidden
    level = window.masked_fill(~seen, 0).sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True)
    values = ((window - level) / SCALE)[..., None]
    times = (weeks / WEEKS).expand(len(starts), -1)
    xc, yc = context_of(times, values, seen[..., None])
    known = hidden & ~window.isnan()
    known[:, 0] |= ~known.any(dim=1)  # a gap without a known week: any target, which the loss takes in
    return Batch(xc, yc, xc, values.nan_to_num(), target_mask=known)


class Gaps:
    """Windows of the training years with a random gap."""

    def __init__(self, ppm: Tensor) -> None:
        self.ppm = ppm

    def training(self, seed: int) -> torch.Generator:
        """The stream of windows and gaps."""
        return torch.Generator().manual_seed(seed)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """Windows with gaps of 4 to 20 weeks."""
        starts = torch.randint(len(self.ppm) - WEEKS, (size,), generator=generator)
        gap = torch.randint(4, 21, (size,), generator=generator)
        first = (torch.rand(size, generator=generator) * (WEEKS - gap)).long()
        return batch_of(self.ppm, starts, first, gap).to(device)

    def validation(self):
        """Fixed windows of the training years."""
        return iter([self.sample(64, torch.Generator().manual_seed(10**6))])

    @staticmethod
    def metric(dist, batch: Batch) -> Tensor:
        """Log-likelihood."""
        return dist.log_prob(batch.yt)


def test_batch(ppm: Tensor, windows: int = 40) -> Batch:
    """Windows with a gap of 12 weeks in the middle."""
    starts = torch.linspace(0, len(ppm) - WEEKS - 1, windows).long()
    return batch_of(ppm, starts, torch.full((windows,), 46), torch.full((windows,), 12))


def kernel(a: Tensor, b: Tensor, log: Tensor) -> Tensor:
    """Smooth and yearly: s1 exp(-d^2 / 2 l1^2) + s2 exp(-2 sin^2(pi d) / l2^2), with d in years."""
    d = (a[..., :, None] - b[..., None, :]) * WEEKS / 52.18
    s1, l1, s2, l2, _ = log.exp()
    return s1 * torch.exp(-0.5 * (d / l1) ** 2) + s2 * torch.exp(-2 * (torch.sin(math.pi * d) / l2) ** 2)


def gp(row: Batch, log: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and spread at `at`, and the log marginal likelihood of what was seen in the only row."""
    seen = row.yc[0, :, 1] > 0
    x, y = row.xc[0, seen, 0].double(), row.yc[0, seen, 0].double()
    chol = torch.linalg.cholesky(kernel(x, x, log) + (log[-1].exp() + 1e-6) * torch.eye(len(x), dtype=y.dtype))
    white = torch.linalg.solve_triangular(chol, y[:, None], upper=False)[:, 0]
    cross = torch.linalg.solve_triangular(chol, kernel(x, at.double(), log), upper=False)
    variance = kernel(at[:1].double(), at[:1].double(), log)[0, 0] - cross.square().sum(dim=0) + log[-1].exp()
    evidence = -0.5 * white.square().sum() - chol.diagonal().log().sum() - 0.5 * len(y) * math.log(2 * math.pi)
    return cross.T @ white, variance.clamp_min(1e-9).sqrt(), evidence


def fit_gp(task: Gaps, steps: int = 60) -> Tensor:
    """Log hyperparameters that make eight training windows most likely."""
    log = torch.tensor([0.0, -0.7, 0.7, 0.0, -3.0], dtype=torch.float64, requires_grad=True)
    rows = task.sample(8, torch.Generator().manual_seed(1))
    optimiser = torch.optim.Adam([log], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        evidence = [gp(rows.rows(slice(i, i + 1)), log, rows.xt[i, :1, 0])[2] for i in range(8)]
        (-torch.stack(evidence).mean()).backward()
        optimiser.step()
    return log.detach()


def line(row: Batch) -> Tensor:
    """Linear interpolation of the only row at all weeks."""
    seen = row.yc[0, :, 1] > 0
    x, y, at = row.xc[0, seen, 0], row.yc[0, seen, 0], row.xt[0, :, 0]
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    share = ((at - x[right - 1]) / (x[right] - x[right - 1])).clamp(0, 1)
    return y[right - 1] + share * (y[right] - y[right - 1])


def score(mean: Tensor, spread: Tensor | None, batch: Batch) -> str:
    """RMSE in ppm, log-likelihood per week, and the share of weeks inside two spreads."""
    known, truth = batch.target_mask, batch.yt[..., 0]
    assert known is not None
    rmse = SCALE * float((mean - truth)[known].square().mean().sqrt())
    if spread is None:
        return f"RMSE {rmse:.3f} ppm"
    likelihood = torch.distributions.Normal(SCALE * mean, SCALE * spread).log_prob(SCALE * truth)[known].mean()
    inside = ((mean - truth).abs() < 2 * spread)[known].float().mean()
    return f"RMSE {rmse:.3f} ppm, log-likelihood {float(likelihood):.2f}, {100 * float(inside):.0f} % within 2 spreads"


def draw(file: Path, batch: Batch, answers: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The gap of one window, with the answers of two models and their spreads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    row, weeks = 13, slice(30, 74)
    at, truth = torch.arange(WEEKS)[weeks], SCALE * batch.yt[row, weeks, 0]
    seen = batch.yc[row, weeks, 1] > 0
    figure, panels = plt.subplots(1, len(answers), figsize=(4 * len(answers), 3), sharey=True, layout="constrained")
    for panel, (name, (mean, spread)) in zip(panels, answers.items(), strict=True):
        low, high = (SCALE * (mean + sign * 2 * spread)[row, weeks] for sign in (-1, 1))
        panel.fill_between(at, low, high, alpha=0.25)
        panel.plot(at, SCALE * mean[row, weeks], label="mean and 2 spreads")
        panel.plot(at[seen], truth[seen], "k.", label="seen")
        panel.plot(at[~seen], truth[~seen], "r.", label="hidden")
        panel.set(title=name, xlabel="week")
    panels[0].set_ylabel("CO2 against the window's mean, ppm")
    panels[0].legend()
    figure.savefig(file, dpi=110)
    print(f"written: {file}")


def main(arguments: list[str] | None = None) -> None:
    """Train, fill and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    ppm = read_co2()
    split = int(0.78 * len(ppm))  # the end of 1991
    task, batch = Gaps(ppm[:split]), test_batch(ppm[split:])
    rows = [batch.rows(slice(i, i + 1)) for i in range(len(batch.xc))]
    print(f"{'straight line':14} {score(torch.stack([line(row) for row in rows]), None, batch)}")
    log = fit_gp(task)
    filled = [gp(row, log, row.xt[0, :, 0])[:2] for row in rows]
    answers = {"Gaussian process": tuple(torch.stack(part).float() for part in zip(*filled, strict=True))}
    print(f"{'GP':14} {score(*answers['Gaussian process'], batch)}")
    for name in options.models:
        torch.manual_seed(0)
        model = MODELS[name]()
        config = TrainConfig(
            steps=options.steps, batch=32, lr=3e-3, warmup=min(50, options.steps), evaluate_every=10**6
        )
        fit(model, task, config)
        with torch.inference_mode():
            dist = model.eval().predict(batch.xc, batch.yc, batch.xt).base_dist
        answers[name] = dist.mean[..., 0], dist.stddev[..., 0]
        print(f"{name:14} {score(*answers[name], batch)}", flush=True)
    if options.out is not None:
        draw(options.out, batch, answers)


if __name__ == "__main__":
    main()
