"""Run by test_sharded.py: forks groups of processes, compares what each gets with one process, writes what failed.

Torch is imported once, before the forks. Every check runs on all processes of its group together.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from retreever import InputError, RetreeverError, TreeCrossAttention
from retreever.sharded.tree import ShardedTree

TIMEOUT = 20.0  # of the group whose process is killed; others may compile on a busy machine
Check = Callable[[int, int], None]


@dataclass
class Case:
    """Tokens dealt out to processes: process r gets the shares[r]-th part of every row, ragged where `cut` says so."""

    shares: Sequence[int]
    queries: Sequence[int]
    rows: int = 2
    cut: Sequence[int] = ()  # tokens missing at the end of each row
    dim: int = 16
    seed: int = 0
    settings: Any = None

    def module(self, dtype: torch.dtype = torch.float64, impl: Any = "reference") -> TreeCrossAttention:
        torch.manual_seed(self.seed)
        return TreeCrossAttention(self.dim, 2, impl=impl, **(self.settings or {})).to(dtype).eval()

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor | None, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        n, m = sum(self.shares), sum(self.queries)
        context = torch.randn(self.rows, n, self.dim, generator=generator, dtype=torch.float64).to(dtype)
        query = 3 * torch.randn(self.rows, m, self.dim, generator=generator, dtype=torch.float64).to(dtype)
        mask = None
        if self.cut:
            mask = torch.arange(n) < n - torch.tensor(self.cut)[:, None]
        return context, mask, query

    def mine(self, rank: int, sizes: Sequence[int]) -> slice:
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def build(module: TreeCrossAttention, case: Case, rank: int, world: int, context: Tensor, mask: Any) -> ShardedTree:
    own = case.mine(rank, case.shares)
    mesh = init_device_mesh("cpu", (world,))
    return module.build_sharded(context[:, own], mesh, None if mask is None else mask[:, own])


def same(found: Any, wanted: Any, own: slice, tolerance: float) -> None:
    assert torch.equal(found.path, wanted.path[:, own]), "paths"
    for name in ("output", "log_prob", "entropy", "leaves"):
        mine, all_ = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (all_ is None), name
        if mine is not None and mine.numel():
            error = (mine - all_[:, own]).detach().abs() / all_[:, own].detach().abs().clamp_min(1)
            assert float(error.max()) <= tolerance, name
    assert torch.equal(found.selected.sort(dim=2).values, wanted.selected[:, own].sort(dim=2).values), "selected"
    assert torch.equal(found.nodes_scored, wanted.nodes_scored[:, own]), "nodes scored"


CASES = {
    "even": Case((16, 16, 16, 16), (5, 5, 5, 5)),
    "not divisible": Case((10, 9, 9, 9), (3, 4, 5, 6)),
    "uneven shares": Case((31, 2, 3, 17), (6, 0, 1, 9)),
    "a process without tokens": Case((20, 0, 13, 12), (4, 4, 4, 4)),
    "all tokens on one": Case((0, 0, 45, 0), (2, 3, 4, 5)),
    "ragged": Case((16, 10, 9, 20), (5, 3, 4, 5), rows=4, cut=(0, 13, 40, 54)),
    "branch 3": Case((20, 21, 0, 22), (4, 4, 4, 4), settings={"branch": 3}),
    "branch 5, ragged": Case((30, 31, 32, 1), (4, 4, 4, 4), rows=3, cut=(0, 50, 90), settings={"branch": 5}),
    "fewer tokens than processes": Case((1, 1, 0, 1), (2, 2, 2, 2)),
    "one token": Case((0, 1, 0, 0), (2, 2, 2, 2)),
    "means": Case((11, 0, 13, 20), (4, 4, 4, 4), settings={"aggregator": "mean", "log_count": True}),
    "means, ragged": Case(
        (11, 0, 13, 20), (4, 4, 4, 4), rows=3, cut=(0, 30, 43), settings={"aggregator": "mean", "log_count": True}
    ),
    "counts": Case((11, 9, 13, 20), (4, 4, 4, 4), cut=(3, 0), settings={"log_count": True, "detach": True}),
}


def compare(case: Case, rank: int, world: int) -> None:
    """One path, forced and sampled paths, budgets and all leaves, against one process."""
    module, (context, mask, query) = case.module(), case.tensors()
    own = case.mine(rank, case.queries)
    with torch.no_grad():
        whole = module.build(context, mask)
        tree = build(module, case, rank, world, context, mask)
        assert tree.plan == whole.plan
        same(module(query[:, own], tree), module(query, whole), own, 1e-10)
        generator = torch.Generator().manual_seed(1)
        noise = torch.rand(*query.shape[:2], whole.plan.depth, generator=generator)
        choices = torch.where(noise < 0.3, (noise * 1000).long() % whole.plan.branch, -1)
        found = module(query[:, own], tree, noise[:, own], choices[:, own], leaves=True)
        same(found, module(query, whole, noise, choices, leaves=True), own, 1e-10)
        for budget in (1, 19, 40, 1000):
            same(module(query[:, own], tree, budget=budget), module(query, whole, budget=budget), own, 1e-10)
        module.retrieval = "full"
        found, wanted = module(query[:, own], tree), module(query, whole)
        assert not found.output.numel() or float((found.output - wanted.output[:, own]).abs().max()) <= 1e-10


def single_precision(rank: int, world: int) -> None:
    """With kernels on one process and plain torch on the others."""
    case = Case((300, 225, 250, 249), (40, 40, 40, 40), dim=32)
    module = case.module(torch.float32, "auto" if rank == 1 else "reference")
    context, _, query = case.tensors(torch.float32)
    own = case.mine(rank, case.queries)
    with torch.no_grad():
        tree, whole = build(module, case, rank, world, context, None), module.build(context)
        for budget in (None, 48):
            same(module(query[:, own], tree, budget=budget), module(query, whole, budget=budget), own, 1e-6)


def loss_of(found: Any, weight: Tensor) -> Tensor:
    assert found.leaves is not None
    return ((found.output + 0.5 * found.leaves) * weight).sum() + (0.1 * found.log_prob + found.entropy).sum()


def gradients(case: Case, rank: int, world: int, budget: int | None) -> None:
    """Sums over processes are the gradients of one process, for weights, tokens and queries."""
    context, mask, query = case.tensors()
    weight = torch.randn(query.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own, tokens = case.mine(rank, case.queries), case.mine(rank, case.shares)
    wanted = _gradients(case, context, mask, query, weight, budget)
    module, own_context = case.module(), context[:, tokens].clone().requires_grad_()
    own_query = query[:, own].clone().requires_grad_()
    part = None if mask is None else mask[:, tokens]
    tree = module.build_sharded(own_context, init_device_mesh("cpu", (world,)), part)
    loss_of(module(own_query, tree, budget=budget, leaves=True), weight[:, own]).backward()  # type: ignore[no-untyped-call]
    assert own_context.grad is not None and own_query.grad is not None
    for name, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        assert torch.allclose(grad, wanted[name], atol=1e-5, rtol=1e-7), name
    assert torch.allclose(own_context.grad, wanted["context"][:, tokens], atol=1e-5), "context"
    assert torch.allclose(own_query.grad, wanted["query"][:, own], atol=1e-5), "query"


def _gradients(case: Case, context: Tensor, mask: Any, query: Tensor, weight: Tensor, budget: Any) -> dict[str, Tensor]:
    module = case.module()
    context, query = context.clone().requires_grad_(), query.clone().requires_grad_()
    tree = module.build(context, mask)
    loss_of(module(query, tree, budget=budget, leaves=True), weight).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in module.named_parameters()}
    assert context.grad is not None and query.grad is not None
    return {**found, "context": context.grad, "query": query.grad}


def replicas(rank: int, world: int) -> None:
    """Copies of a hot subtree change neither results nor gradients, and its queries stay at home."""
    case = CASES["ragged"]
    module, (context, mask, query) = case.module(), case.tensors()
    own = case.mine(rank, case.queries)
    tree, whole = build(module, case, rank, world, context, mask), module.build(context, mask)
    wanted = module(query, whole)
    for copied in (tree.replicate([0]), tree.replicate([0, 3], onto=[2]), tree.replicate([2], [1]).replicate([2])):
        same(module(query[:, own], copied), wanted, own, 1e-10)
        same(module(query[:, own], copied, budget=15), module(query, whole, budget=15), own, 1e-10)
    hot = tree.replicate(range(tree.shards.count))
    with torch.no_grad():
        assert _sent(hot, lambda: module(query[:, own], hot)) <= 8 * world  # every process has all: counts alone
    module.zero_grad()
    module(query[:, own], tree.replicate([0, 1])).output.sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    module.zero_grad()
    wanted.output.sum().backward()
    for grad, parameter in zip(grads, module.parameters(), strict=True):
        assert torch.allclose(grad, torch.zeros_like(grad) if parameter.grad is None else parameter.grad, atol=1e-5)


def _sent(tree: ShardedTree, call: Callable[[], object]) -> int:
    before = tree.wire.sent
    call()
    return tree.wire.sent - before


def bytes_sent(rank: int, world: int) -> None:
    """Bytes per query are the same for 64 and for 65,536 tokens, and are those of the cost model."""
    sent, budgeted = [], []
    for n in (16, 1024, 16384):
        case = Case((n,) * 4, (64,) * 4, rows=1, settings={"aggregator": "mean"})
        module, (context, _, query) = case.module(torch.float32), case.tensors(torch.float32)
        own = query[:, case.mine(rank, case.queries)]
        with torch.no_grad():
            tree = build(module, case, rank, world, context, None)
            away = int((tree.subtree_of(module(own, tree).path) != rank).sum())
            sent.append((_sent(tree, partial(module, own, tree)), away))
            budgeted.append(_sent(tree, partial(module, own, tree, budget=40)))
    totals = torch.tensor([[total for total, _ in sent], [away for _, away in sent], budgeted])
    dist.all_reduce(totals)
    # A query out: 16 numbers and two of 8 bytes. Its answer: output, lse, log_prob, entropy and a path of 8 bytes.
    for total, away in totals[:2].T.tolist():
        assert total == away * (16 * 4 + 16 + (16 + 2 + 2) * 4 + 8) + world * (world - 1) * 8
    # A budget travels once a level, and its nodes are fewer on each: bytes are bounded by the budget.
    assert totals[2].max() <= 40 * 4 * 64 * (16 * 4 + 24 + 2 * 2 * 4 + 16 + 8)
    assert totals[2, 2] <= 1.5 * totals[2, 1]


def bad_inputs(rank: int, world: int) -> None:
    """What one process cannot use is refused by all, none waits."""
    mesh = init_device_mesh("cpu", (world,))
    module = CASES["even"].module()
    context = torch.zeros(2, 3, 16, dtype=torch.float64)
    expect("context: expected shape", lambda: module.build_sharded(context[..., : 16 if rank else 15], mesh), rank == 0)
    expect("got an error on [0]", lambda: module.build_sharded(context[..., : 16 if rank else 15], mesh), rank > 0)
    expect("as many rows", lambda: module.build_sharded(context[: 2 - rank % 2], mesh))
    expect("at least one token in every row", lambda: module.build_sharded(context[:, :0], mesh))
    expect("mesh: expected a DeviceMesh", lambda: module.build_sharded(context, world))  # type: ignore[arg-type]
    tree = module.build_sharded(context, mesh)
    expect("subtrees: expected numbers from 0 to 3, got 4", lambda: tree.replicate([4]))
    expect("query: expected shape", lambda: module(context[:1], tree))


def expect(text: str, call: Callable[[], object], here: bool = True) -> None:
    try:
        call()
    except InputError as error:
        assert not here or text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


def killed(rank: int, world: int) -> None:
    """A process that dies between two calls is an error of one line on the others."""
    case = CASES["even"]
    module, (context, _, query) = case.module(), case.tensors()
    tree = build(module, case, rank, world, context, None)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(1000):
            module(query[:, case.mine(rank, case.queries)], tree).output.sum().backward()
    except RetreeverError as error:
        assert f"process {rank} of {world} lost the others: " in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("no error")
    assert time.monotonic() - started < TIMEOUT + 10


FOUR: dict[str, Check] = {name: lambda r, w, case=case: compare(case, r, w) for name, case in CASES.items()}  # type: ignore[misc]
for _name in ("not divisible", "a process without tokens", "ragged", "branch 3", "one token", "means, ragged"):
    for _budget in (None, 14):
        FOUR[f"gradients, {_name}, budget {_budget}"] = (
            lambda r, w, case=CASES[_name], budget=_budget: gradients(case, r, w, budget)  # type: ignore[misc]
        )
FOUR |= {
    "single precision": single_precision,
    "replicas": replicas,
    "bytes": bytes_sent,
    "bad inputs": bad_inputs,
}
THREE: dict[str, Check] = {
    "three processes": lambda r, w: compare(Case((20, 3, 24), (4, 5, 6), rows=3, cut=(0, 20, 45)), r, w),
    "three processes, gradients": lambda r, w: gradients(Case((20, 3, 24), (4, 0, 6)), r, w, 14),
}
GROUPS: dict[str, tuple[int, dict[str, Check]]] = {
    "four": (4, FOUR),
    "three": (3, THREE),
    "one": (1, {"one process": lambda r, w: compare(Case((37,), (9,)), r, w)}),
    "killed": (4, {"killed": killed}),
}


def work(group: str, rank: int, folder: Path) -> None:
    """All checks of a group on one process; what failed goes to a file."""
    world, checks = GROUPS[group]
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT if group == "killed" else 120)
    dist.init_process_group("gloo", f"file://{folder}/{group}", timeout=limit, rank=rank, world_size=world)
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check(rank, world)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # the others are elsewhere now
    (folder / f"{group}-{rank}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    """Fork the processes of every group, one group after another."""
    for group, (world, _) in GROUPS.items():
        children = []
        for rank in range(world):
            child = os.fork()
            if not child:
                try:
                    work(group, rank, folder)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
