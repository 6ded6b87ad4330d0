"""Does every backend compute what it should on every device here?

The reference is measured against the walk of `retreever.doctor.problem`, the other backends against the reference in
float64: results, and gradients through all of them. On CUDA the kernels that build trees are measured, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from retreever.attention import TreeCrossAttention
from retreever.doctor.problem import Problem, derivatives, problems, walk
from retreever.nn.triton_here import triton_installed
from retreever.ops.api import Impl, unavailable

Status = Literal["ok", "wrong", "not available"]
BACKENDS: tuple[Impl, ...] = ("reference", "numba", "triton")
FORWARD = ("output", "path", "log_prob", "entropy")
TRAINING = tuple(f"{name} in training" for name in FORWARD)  # backends go another way when gradients are asked for
GRADIENTS = ("gradient of q", "gradient of keys", "gradient of values")
NAMES = FORWARD + TRAINING + GRADIENTS
# Largest errors of results and of gradients, relative to the largest number of each.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-8)}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `detail`: the largest errors, or what is wrong, or why it is not available."""

    name: str
    device: str
    status: Status
    detail: str
    milliseconds: float


class Error(NamedTuple):
    """How far a result is off, relative to its scale, and how far it may be."""

    what: str
    size: float
    limit: float


def collect() -> list[Check]:
    """Check every backend on every device, and the building of trees on CUDA."""
    checks = []
    for device in device_names():
        checks += [check(impl, device, partial(backend_errors, impl, device)) for impl in BACKENDS]
        if device.startswith("cuda"):
            checks.append(check("tree building", device, partial(building_errors, device)))
    return checks


def device_names() -> list[str]:
    """The CPU and every accelerator."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *(f"{found.type}:{i}" for i in range(torch.accelerator.device_count()) if found)]


def check(name: str, device: str, compute: Callable[[], list[Error] | str]) -> Check:
    """Judge what `compute` returns: the errors it measured, or why it cannot run here. What it raises is wrong."""
    started = time.perf_counter()
    try:
        status, detail = judge(compute())
    except Exception as error:
        status, detail = "wrong", one_line(error)
    return Check(name, device, status, detail, 1e3 * (time.perf_counter() - started))


def judge(found: list[Error] | str) -> tuple[Status, str]:
    """The verdict, and the line that explains it."""
    if isinstance(found, str):
        return "not available", found
    bad = [error for error in found if not error.size <= error.limit]  # so that NaN is bad
    what, size, limit = bad[0] if bad else max(found, key=lambda error: error.size / error.limit)
    return "wrong" if bad else "ok", f"{what} is off by {size:.0e} of its scale, {limit:.0e} is allowed"


def one_line(error: Exception) -> str:
    """An exception in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def backend_errors(impl: Impl, device: str) -> list[Error] | str:
    """Errors of one backend on all problems, or why it cannot run."""
    double = impl == "reference" and not device.startswith("mps")
    dtype = torch.float64 if double else torch.float32
    reason = unavailable(impl, device, dtype)
    if reason is not None:
        return reason
    errors = []
    for problem in problems():
        found = solve(impl, problem, device, dtype)
        if impl == "reference":
            for name, direction in zip(GRADIENTS, problem.directions, strict=True):
                found[name] = (found[name] * torch.from_numpy(direction)).sum()
            exact = by_hand(problem)
        else:
            exact = solve("reference", problem, "cpu", torch.float64)
        errors += compare(found, exact, LIMITS[dtype], f" ({problem.title})")
    return errors


def solve(impl: Impl, problem: Problem, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results of a backend without and with gradients, and the gradients of q, keys and values, by name."""
    search = getattr(import_module(f"retreever.ops.{impl}"), f"tree_attention_{impl}")
    inputs = [torch.tensor(x, dtype=dtype, device=device, requires_grad=True) for x in problem.inputs]
    mask = None if problem.mask is None else torch.tensor(problem.mask, device=device)
    noise = None if problem.noise is None else torch.tensor(problem.noise, dtype=dtype, device=device)
    with torch.no_grad():
        found = search(*inputs, problem.plan, mask, noise)
    with torch.enable_grad():
        training = search(*inputs, problem.plan, mask, noise)
        pairs = zip((training[0], *training[2:]), problem.slopes, strict=True)
        loss = sum((x * torch.tensor(slope, dtype=dtype, device=device)).sum() for x, slope in pairs)
        gradients = torch.autograd.grad(loss, inputs)
    return {name: x.detach().cpu().double() for name, x in zip(NAMES, (*found, *training, *gradients), strict=True)}


def by_hand(problem: Problem) -> dict[str, Tensor]:
    """The same from the walk in numpy; gradients along one direction each."""
    found = walk(problem)[:4]
    results = zip(NAMES, (*found, *found, *derivatives(problem)), strict=True)
    return {name: torch.as_tensor(x, dtype=torch.float64) for name, x in results}


def compare(
    found: dict[str, Tensor], exact: dict[str, Tensor], limits: tuple[float, float], where: str = ""
) -> list[Error]:
    """Largest difference of each result over its largest number; one wrong step of a path exceeds every limit.

    The path comes first: where it is wrong, so is the rest.
    """
    return [
        Error(
            name + where,
            float((found[name] - exact[name]).abs().max() / exact[name].abs().max()),
            limits[name in GRADIENTS],
        )
        for name in sorted(exact, key=lambda name: not name.startswith("path"))
    ]


def building_errors(device: str) -> list[Error] | str:
    """Errors of a tree built as inference builds it (by fused kernels on CUDA) against plain torch in float64."""
    if not triton_installed():
        return "triton is not installed: trees are built in plain torch"
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # making a module draws weights, which the caller should not notice
        module = TreeCrossAttention(64).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    context = torch.randn(2, 50, 64, generator=generator).to(device)
    mask = torch.arange(50, device=device) < torch.tensor([[50], [21]], device=device)
    with torch.no_grad():
        fused = module.to(device).build(context, mask)
    with torch.enable_grad():  # asking for gradients takes the plain way
        plain = module.double().build(context.double(), mask)
    limit = 1e-2 if torch.backends.cuda.matmul.allow_tf32 else LIMITS[torch.float32][0]
    found, exact = (
        {name: getattr(tree, name).detach().double() for name in ("mask", "nodes", "keys", "values")}
        for tree in (fused, plain)
    )
    return compare(found, exact, (limit, limit))
