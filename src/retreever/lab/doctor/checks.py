"""Checks that every backend computes correct results and gradients on every device.

Plain torch is compared with torch's own attention, the kernels with plain torch in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.attention import TreeCrossAttention
from retreever.ops.attention.api import attention
from retreever.ops.backend import Impl, unavailable
from retreever.ops.search.api import search
from retreever.ops.search.inputs import SearchInputs
from retreever.tree.plan import TreePlan

Status = Literal["ok", "wrong", "not available"]
Named = dict[str, Tensor]
BACKENDS: tuple[Impl, ...] = ("reference", "numba", "triton")
# Largest errors of results and of gradients, relative to the largest number of each.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-8)}


@dataclass(frozen=True)
class Check:
    """Outcome of one check. `detail`: the largest error, or what is wrong, or why it is not available."""

    name: str
    device: str
    status: Status
    detail: str
    milliseconds: float


class Error(NamedTuple):
    """Error of a result, relative to its largest number, and the largest error allowed."""

    what: str
    size: float
    limit: float


def collect() -> list[Check]:
    """Check every backend on every device, and the other kernels on CUDA."""
    checks = []
    for device in device_names():
        checks += [check(impl, device, partial(search_errors, impl, device)) for impl in BACKENDS]
        if device.startswith("cuda"):
            checks.append(check("attention", device, partial(attention_errors, device)))
            checks.append(check("tree building", device, partial(building_errors, device)))
    return checks


def device_names() -> list[str]:
    """The CPU and every accelerator."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *(f"{found.type}:{i}" for i in range(torch.accelerator.device_count()) if found)]


def check(name: str, device: str, compute: Callable[[], list[Error] | str]) -> Check:
    """Run `compute`, which returns errors or why it cannot run, and judge its result; an exception is "wrong"."""
    started = time.perf_counter()
    try:
        status, detail = judge(compute())
    except Exception as error:
        status, detail = "wrong", one_line(error)
    return Check(name, device, status, detail, 1e3 * (time.perf_counter() - started))


def judge(found: list[Error] | str) -> tuple[Status, str]:
    """The status of a check, and the line that explains it."""
    if isinstance(found, str):
        return "not available", found
    bad = [error for error in found if not error.size <= error.limit]  # written so that NaN is bad
    what, size, limit = bad[0] if bad else max(found, key=lambda error: error.size / error.limit)
    return "wrong" if bad else "ok", f"{what} is off by {size:.0e} of its scale, {limit:.0e} is allowed"


def one_line(error: Exception) -> str:
    """An exception in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def search_errors(impl: Impl, device: str) -> list[Error] | str:
    """Errors of one backend of the search, or why it cannot run."""
    dtype = torch.float64 if impl == "reference" and not device.startswith("mps") else torch.float32
    reason = unavailable(impl, device, dtype)
    if reason is not None:
        return reason
    errors = []
    for title, plan, sampled in (("argmax", TreePlan(50), False), ("sampled", TreePlan(27, 3), True)):
        found, exact = (searched(*kind, plan, sampled) for kind in _pair(impl, device, dtype))
        errors += compare(found, exact, LIMITS[dtype], f" ({title})")
    return errors + (flat_errors(device, dtype) if impl == "reference" else [])


def _pair(impl: Impl, device: str, dtype: torch.dtype) -> tuple[tuple[Impl, str, torch.dtype], ...]:
    return (impl, device, dtype), ("reference", "cpu", torch.float64)


def searched(impl: Impl, device: str, dtype: torch.dtype, plan: TreePlan, sampled: bool) -> Named:
    """Results of a search without and with gradients, and the gradients of q, keys and values, by name.

    `sampled` gives it noise, and a mask.
    """
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 8, 4, 8), (2, plan.nodes, 4, 8), (2, plan.nodes, 4, 8))
    inputs = [2 * torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    noise = mask = None
    if sampled:
        noise = torch.rand(2, 8, plan.depth, generator=generator, dtype=torch.float64).to(device, dtype)
        mask = torch.ones(2, plan.nodes, dtype=torch.bool, device=device)
        mask[1, 1] = mask[0, -1] = False
    q, keys, values = tensors = [x.to(device, dtype).requires_grad_() for x in inputs]
    with torch.no_grad():
        plain = search(SearchInputs(q, keys, values, plan, mask, noise), impl)
    with torch.enable_grad():
        found = search(SearchInputs(q, keys, values, plan, mask, noise), impl)
        loss = found.output.sum() + (found.log_prob + 0.5 * found.entropy).sum()
        gradients = torch.autograd.grad(loss, tensors)
    named = plain._asdict() | {f"{name} in training": value for name, value in found._asdict().items()}
    named |= {f"gradient of {name}": value for name, value in zip(("q", "keys", "values"), gradients, strict=True)}
    return {name: value.detach().cpu().double() for name, value in named.items() if value is not None}


def _flat(device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 6, 2, 8, generator=generator).to(device, dtype) for _ in range(3)]


def flat_errors(device: str, dtype: torch.dtype) -> list[Error]:
    """Errors against torch's attention over all tokens, which a tree with as many branches as tokens must equal."""
    q, keys, values = _flat(device, dtype)
    found = search(SearchInputs(q, keys, values, TreePlan(6, 6)), "reference").output
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    exact = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2)
    return compare({"output": found.double()}, {"output": exact.double()}, LIMITS[dtype], " (all tokens)")


def attention_errors(device: str) -> list[Error] | str:
    """Errors of the training kernel of attention over all tokens."""
    reason = unavailable("triton", device, torch.float32)
    if reason is not None:
        return reason

    def attended(impl: Impl, device: str, dtype: torch.dtype) -> Named:
        tensors = [x.requires_grad_() for x in _flat(device, dtype)]
        mask = torch.arange(6, device=device)[None] < 5
        output = attention(tensors[0], tensors[1], tensors[2], mask, impl=impl)
        gradients = torch.autograd.grad(output.square().sum(), tensors)
        named = dict(zip(("output", "q", "keys", "values"), (output, *gradients), strict=True))
        return {name: value.detach().cpu().double() for name, value in named.items() if value is not None}

    found, exact = (attended(*kind) for kind in _pair("triton", device, torch.float32))
    return compare(found, exact, _product_limits(device))


def building_errors(device: str) -> list[Error] | str:
    """Errors of a tree built by the kernel that inference uses."""
    reason = unavailable("triton", device, torch.float32)
    if reason is not None:
        return f"{reason}: trees are built in plain torch"
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # keep the state of the global generator
        module = TreeCrossAttention(64, impl="triton").eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    context = torch.randn(2, 50, 64, generator=generator).to(device)
    mask = torch.arange(50, device=device) < torch.tensor([[50], [21]], device=device)
    with torch.no_grad():
        fused = module.to(device).build(context, mask)
        module.impl = "reference"
        plain = module.double().build(context.double(), mask)
    names = ("mask", "nodes", "keys", "values")
    found, exact = ({name: getattr(tree, name).double() for name in names} for tree in (fused, plain))
    return compare(found, exact, _product_limits(device))


def _product_limits(device: str) -> tuple[float, float]:
    """Largest errors of matrix products; larger where the user allows tf32."""
    exact = torch.get_float32_matmul_precision() == "highest" or device == "cpu"
    limit = LIMITS[torch.float32][0] if exact else 1e-2
    return limit, limit


def compare(found: Named, exact: Named, limits: tuple[float, float], where: str = "") -> list[Error]:
    """Largest difference of each result relative to its largest number; a wrong path exceeds every limit.

    Paths come first, since other results follow from them.
    """
    errors = []
    for name in sorted(exact, key=lambda name: not name.startswith("path")):
        size = float((found[name] - exact[name]).abs().max() / exact[name].abs().max())
        errors.append(Error(name + where, size, limits["gradient" in name]))
    return errors
