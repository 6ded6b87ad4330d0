"""The methods of `retreever bench jobs`: how each is trained in a given time, and how it is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from retreever.batch import Batch
from retreever.lab.bench.jobs.jobs import Job
from retreever.models.perceiver_io import PerceiverIO
from retreever.models.retreever import ReTreever
from retreever.models.transformer_ca import TransformerCA
from retreever.pretrained.load import load_pretrained
from retreever.train.staged import FIRST, Learn, nodes_alone, teaching
from retreever.tree.plan import TreePlan

WARMUP, CLIP = 0.05, 1.0  # the share of the time that the warm-up takes, the largest norm of a gradient
WIDE = 8
ALL, PERCEIVER, SCRATCH, TUNED = "all tokens", "Perceiver IO", "tree from scratch", "gp weights, tuned"
STAGED, WHOLE = "tree, nodes trained", "wide tree, all trained"


@dataclass(frozen=True)
class Trained:
    """A trained model, how many steps it took, and trees it was converted to, by name."""

    model: Any
    steps: int
    trees: dict[str, ReTreever] = field(default_factory=dict)


def rivals(job: Job, n: int) -> dict[str, Callable[[float, int, torch.device], Trained]]:
    """How each method is trained: called with seconds, seed and device."""
    one_path = TreePlan(n).tokens
    found: dict[str, Callable[[float, int, torch.device], Trained]] = {
        ALL: partial(converted, job),
        PERCEIVER: lambda s, seed, d: train(
            job, seeded(seed, lambda: PerceiverIO(**perceiver(job, one_path))).to(d), s, seed, d
        ),
        SCRATCH: lambda s, seed, d: train(job, seeded(seed, lambda: ReTreever(**job.fields)).to(d), s, seed, d),
        STAGED: lambda s, seed, d: staged(job, s, seed, d, "nodes", round(job.budget * n)),
        WHOLE: lambda s, seed, d: staged(job, s, seed, d, "all", branch=wide(n), mean_levels=1),
    }
    if job.name == "co2":
        # 5e-4 was chosen on validation: with 3e-4 there is less progress, with 7e-4 one run in two lost all it knew
        found[TUNED] = lambda s, seed, d: train(job, load_pretrained("gp").to(d), s, seed, d, rate=0.5 * job.rate)
    return found


def wide(n: int) -> int:
    """Children of a node that make about two decisions of a path, and three times as many tokens."""
    return max(2, round(n ** (1 / 3)))


def perceiver(job: Job, latents: int) -> dict[str, Any]:
    """Settings of Perceiver IO: two blocks where the others have no encoder."""
    given = {name: value for name, value in job.fields.items() if name != "encoder"}
    return given | {"latents": latents, "layers": job.fields.get("layers", 2)}


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    """A model with the weights of a seed."""
    torch.manual_seed(seed)
    return make()


def converted(job: Job, seconds: float, seed: int, device: torch.device) -> Trained:
    """Attention over all tokens, and trees of means of it, which nothing is trained for."""
    found = train(job, seeded(seed, lambda: TransformerCA(**job.fields)).to(device), seconds, seed, device)
    trees = {
        name: ReTreever.from_transformer_ca(found.model, aggregator="mean", correct=False, branch=branch)
        for name, branch in (("tree", 2), (f"tree of {WIDE}", WIDE))
    }
    return Trained(found.model, found.steps, trees)


def staged(
    job: Job, seconds: float, seed: int, device: torch.device, learn: Learn, budgets: int = 0, **tree: Any
) -> Trained:
    """Attention first, then converted and trained on, as `fit_staged` does in steps."""
    attention, share = seeded(seed, lambda: TransformerCA(**job.fields)).to(device), FIRST[learn]
    first = train(job, attention, share * seconds, seed, device)
    found = ReTreever.from_transformer_ca(first.model, objective=teaching(budgets, learn), **tree)
    nodes = learn == "nodes"
    with nodes_alone(found) if nodes else nullcontext():
        second = train(job, found, (1 - share) * seconds, seed + 1000, device, rate=job.rate / (2 if nodes else 1))
    return Trained(second.model, first.steps + second.steps)


def train(job: Job, model: Any, seconds: float, seed: int, device: torch.device, rate: float | None = None) -> Trained:
    """Adam for so many seconds, its rate rising (to `rate`, or the job's) and then falling to 0 over them.

    Data are made outside the time, and a first step on a copy compiles what has to be compiled.
    """
    twin = copy.deepcopy(model).train()
    torch.autograd.backward(twin.loss(job.sample(job.batch, torch.Generator().manual_seed(0)).to(device)).total)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    rate = job.rate if rate is None else rate
    optimiser = torch.optim.Adam(learned, rate, fused=True)
    data, paths = job.draws(2 * seed, device), torch.Generator().manual_seed(2 * seed + 1)
    model.train()
    spent, steps = 0.0, 0
    while spent < seconds:
        batch = job.sample(job.batch, data).to(device)
        draws = (model.draws_for(batch, paths),) if hasattr(model, "draws_for") else ()
        _wait(device)
        started = perf_counter()
        done = spent / seconds
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (done + 1e-3) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
        optimiser.zero_grad()
        torch.autograd.backward(model.loss(batch, *draws).total)
        nn.utils.clip_grad_norm_(learned, CLIP)
        optimiser.step()
        _wait(device)
        spent, steps = spent + perf_counter() - started, steps + 1
    return Trained(model.eval(), steps)


def readings(method: str, trained: Trained, job: Job, n: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The ways a model is read: name, model, and arguments of `answer`."""
    for name, model in {method: trained.model, **trained.trees}.items():
        if isinstance(model, ReTreever):
            yield f"{name}, one path", model, {}
            yield f"{name}, {job.budget:.0%} read", model, {"budget": max(1, int(job.budget * n))}
            if model is trained.model:  # others read as the model they were converted from
                yield f"{name}, all read", model, {"budget": n}
        else:
            yield name, model, {}


@torch.inference_mode()
def measured(model: Any, job: Job, tests: Sequence[Batch], device: torch.device, **reading: Any) -> dict[str, float]:
    """Score, tokens read and microseconds per query, with contexts prepared."""
    found, read, times = [], [], []
    for batch in tests:
        moved = batch.to(device)
        memory = model.encode(moved.xc, moved.yc, moved.context_mask)
        for _ in range(2):  # the first call may compile
            _wait(device)
            started = perf_counter()
            dist = model.answer(memory, moved.xt, **reading)
            _wait(device)
            taken = perf_counter() - started
        times.append(1e6 * taken / moved.xt[..., 0].numel())
        found.append(dist)
        if isinstance(model, ReTreever):
            read.append(float(model.search(memory, moved.xt, **reading).tokens_read.float().mean()))
        else:
            mask, n = batch.context_mask, batch.xc.shape[1]
            real = n if mask is None else float(mask.float().sum(dim=1).mean())
            read.append(min(real, model.tokens(n)))
    return {**job.judged(found, tests), "tokens": sum(read) / len(read), "us": min(times)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
