"""Bayesian optimisation in one dimension: evaluations that models and Gaussian processes need to find the minimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever.arguments import check_int, reject
from retreever.errors import BackendError
from retreever.lab.bench import figures
from retreever.lab.bench.machine import describe
from retreever.lab.bench.options_models import OptimiseBench
from retreever.lab.bench.report import Row, Rows, Run, check_different
from retreever.lab.recipes.command import load_run, names_of
from retreever.lab.tables import Table
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.pretrained.load import load_pretrained
from retreever.tasks.optimise import Functions, Predict, draw_functions, evaluations_to, minimise

CLOSE = 0.01  # of the range of a function: its minimum is found
SHOWN = (5, 10, 20, 40)  # evaluations after which the regret is printed
TRUE, FITTED = "GP, true kernel", "GP, fitted kernel"


def measure(options: OptimiseBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    check_int("functions", options.functions, 2)
    check_int("steps", options.steps, 1)
    check_different("kernels", options.kernels)
    run = Run.start("optimise", replace(options, dtype="float32", runs=()))
    rows: Rows = []
    for kernel in options.kernels:
        functions = draw_functions(5 if options.quick else options.functions, kernel)
        for name, predict in predictors(run, options, functions):
            rows.append(row_of(name, kernel, predict, functions, 5 if options.quick else options.steps))
            print(f"{kernel}, {name}: {rows[-1]['evaluations']:.1f} evaluations", flush=True)
    run.publish(rows, [optimise_table(run, options, rows)], partial(draw_optimise, run, rows), {})


def predictors(run: Run, options: OptimiseBench, functions: Functions) -> Iterator[tuple[str, Predict]]:
    """Names of everything compared, and how each predicts."""
    models: dict[str, Model] = {"ReTreever": load_pretrained("gp")}
    for name, path in names_of(options.runs).items():
        models[name] = load_run(path)[1].eval()
        if (models[name].config.dim_x, models[name].config.out) != (1, 1):
            reject("runs", "models of functions of one number", path)
    for name, model in models.items():
        model.to(run.device)
        yield name, partial(predict_with, model, None)
        if isinstance(model, ReTreever):
            yield f"{name}, all leaves", partial(predict_with, model, options.steps + 1)
    yield TRUE, functions.posterior
    if not options.quick:
        yield FITTED, predict_fitted


def predict_with(model: Model, budget: int | None, xc: Tensor, yc: Tensor, xt: Tensor) -> Distribution:
    """Predictions of a model, in its dtype and on its device."""
    weight = next(model.parameters())
    points = (part.to(weight) for part in (xc, yc, xt))
    reading: dict[str, Any] = {} if budget is None else {"budget": budget}
    dist = model.predict(*points, **reading)
    return torch.distributions.Normal(dist.mean.to(xc), dist.stddev.to(xc))


def predict_fitted(xc: Tensor, yc: Tensor, xt: Tensor) -> Distribution:
    """Predictions of BoTorch's `SingleTaskGP`, fitted to the observations of every function, inputs scaled to [0, 1].

    It standardises observations itself, for which it needs two.
    """
    try:
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from gpytorch.mlls import ExactMarginalLogLikelihood
    except ImportError as error:
        raise BackendError(f"botorch: expected the extra botorch, got {error}") from None
    with torch.enable_grad():
        one: dict[str, Any] = {"outcome_transform": None} if xc.shape[1] == 1 else {}
        model = SingleTaskGP((xc + 2) / 4, yc, **one)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    found = model.posterior((xt + 2) / 4, observation_noise=True)
    return torch.distributions.Normal(found.mean, found.variance.sqrt())


def row_of(name: str, kernel: str, predict: Predict, functions: Functions, steps: int) -> Row:
    """Evaluations until the minimum is found, and the regret after every evaluation."""
    regret = minimise(predict, functions, steps)
    span = functions.values.amax(dim=1, keepdim=True) - functions.values.amin(dim=1, keepdim=True)
    needed = evaluations_to(regret, CLOSE * span)
    return {
        "method": name,
        "kernel": kernel,
        "functions": len(needed),
        "evaluations": float(needed.double().mean()),
        "error": float(needed.double().std() / len(needed) ** 0.5),
        "never": int((needed > regret.shape[1]).sum()),
        "regret": [float(f"{value:.4g}") for value in regret.mean(dim=0)],
    }


def optimise_table(run: Run, options: OptimiseBench, rows: Rows) -> Table:
    """Table of evaluations and regrets."""
    shown = [count for count in SHOWN if count <= len(rows[0]["regret"])]
    lines = []
    for row in rows:
        needed = f"{row['evaluations']:.2f} ± {row['error']:.2f}"
        regrets = (f"{row['regret'][count - 1]:.4f}" for count in shown)
        lines.append((row["kernel"], row["method"], needed, row["never"], *regrets))
    columns = ("kernel", "method", "evaluations", "not found", *(f"regret, {count}" for count in shown))
    about = (
        f"{rows[0]['functions']} functions of each kernel; one random point, then {len(rows[0]['regret']) - 1} steps "
        "of expected improvement on a grid of 1,000 points",
        "evaluations: mean ± standard error until a value lies within 1% of a function's range of its minimum; "
        "functions where it never does count as one more than all",
        f"{FITTED}: BoTorch's SingleTaskGP, fitted after every evaluation; {TRUE}: the hyperparameters of the draw",
        describe(run.machine),
    )
    return Table("Bayesian optimisation in one dimension", columns, tuple(lines), about)


def draw_optimise(run: Run, rows: Rows, file: Path) -> Path:
    """Draw bars of evaluations."""
    colour = {True: figures.TREE, False: figures.FULL}
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        bars = groups.setdefault(row["kernel"], {})
        bars[row["method"]] = (row["evaluations"], colour[not row["method"].startswith("GP")])
    return figures.draw_bars(groups, file, "Evaluations until the minimum is found", "evaluations (fewer is better)")
