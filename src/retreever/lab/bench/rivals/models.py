"""Rivals on the weights in the package: the same trained model reads its leaves in other ways, scored by its task."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from retreever.attention import TreeCrossAttention
from retreever.batch import Batch
from retreever.errors import BackendError, DataError
from retreever.lab.bench.options_models import RivalsBench
from retreever.lab.bench.report import Row, Rows, Run, timed
from retreever.lab.bench.rivals.clusters import Clusters
from retreever.lab.bench.rivals.readers import (
    AllTokens,
    Blocks,
    Counts,
    RandomTokens,
    Reader,
    TopK,
    count_nodes,
)
from retreever.lab.bench.timing import Call, time_together
from retreever.lab.recipes.recipe import recipe_from_json
from retreever.models.retreever import ReTreever
from retreever.ops.search.api import tree_attention
from retreever.pretrained.card import read_card
from retreever.pretrained.load import load_weights
from retreever.results import TreeCrossAttentionResult
from retreever.tasks.gp import GPTask
from retreever.train.protocols import Task
from retreever.tree.value import Tree

TREE, TOP, BLOCKS, CLUSTERS, RANDOM = "tree", "exact top-k", "best blocks", "flat clusters", "random k"
ALL, BUILD = "all leaves", "build of the tree"
FACTORS = (1.0, 1.5, 2.0, 4.0)  # budgets, in paths of the largest context
BLOCK = 8  # leaves; contexts are too short for blocks of 64


class LeafReading(nn.Module):
    """Stands in for the attention of a model: `reader` reads as many leaves of a context as the tree reads nodes.

    Without a reader the tree itself is read. `counts` has what was read and scored in every call.
    """

    def __init__(self, inner: TreeCrossAttention, reader: Reader | None, budget: int | None) -> None:
        super().__init__()
        self.inner, self.reader, self.budget = inner, reader, budget
        self.counts: list[Counts] = []

    def forward(self, query: Tensor, tree: Tree, **_: Any) -> TreeCrossAttentionResult:
        found = self.inner(query, tree, budget=self.budget, check=False)
        if self.reader is None:
            self.counts.append(count_nodes(found, tree.plan, tree.mask))
            return found
        normed, q = self.inner.block.start(query)
        wanted = found.tokens_read.double().mean(dim=1).round().int().tolist()
        rows = [self._row(self.reader, q[row], tree, row, wanted[row]) for row in range(len(q))]
        return replace(found, output=self.inner.block.finish(query, normed, torch.stack(rows)))

    def _row(self, reader: Reader, q: Tensor, tree: Tree, row: int, budget: int) -> Tensor:
        reader.prepare(*leaves_of(tree, row), None, budget)
        reading = reader.read(q, budget)
        self.counts.append(reading.counts())
        return reading.output


def leaves_of(tree: Tree, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values (n, h, e) of the real leaves of one context."""
    leaves = slice(tree.plan.leaf_offset, None)
    keys, values = tree.keys[row, leaves], tree.values[row, leaves]
    return (keys, values) if tree.mask is None else (keys[tree.mask[row, leaves]], values[tree.mask[row, leaves]])


@contextmanager
def reading(model: ReTreever, reader: Reader | None, budget: int | None) -> Iterator[LeafReading]:
    """Let the model read its leaves by `reader`, or its tree under `budget`, until the end of the block."""
    inner = model.attention
    stand_in = LeafReading(inner, reader, budget)
    model.attention = stand_in  # type: ignore[assignment]
    try:
        yield stand_in
    finally:
        model.attention = inner


def make_readers() -> dict[str, Reader]:
    """The rivals of a tree over short contexts, by name."""
    return {TOP: TopK(), BLOCKS: Blocks("given", BLOCK), CLUSTERS: Clusters(), RANDOM: RandomTokens()}


def model_rows(run: Run, options: RivalsBench, name: str, left_out: dict[str, str]) -> Rows:
    """Rows of the weights called `name`: the score of every method with every budget, and times on one context."""
    card = read_card(name)
    recipe = recipe_from_json(card.settings)
    try:
        tests = {test: shortened(task, options.batches) for test, task in recipe.task.make_tests(options.data).items()}
        batches = {test: list(islice(task.test(), options.batches)) for test, task in tests.items()}
    except (DataError, BackendError) as error:
        left_out[name] = str(error)
        print(f"{name}: left out: {error}", file=sys.stderr)
        return []
    model: Any = load_weights(card).to(run.device)
    path = model.tokens(recipe.task.context)
    rows: Rows = []
    for test, task in tests.items():
        where = {"part": "models", "weights": name, "test": test, "metric": card.metric}
        rows += [{**where, **row} for row in score_rows(model, task, batches[test], path, run.device)]
        print(f"{name}, {test}: {len(batches[test])} batches", file=sys.stderr, flush=True)
    return rows + time_rows(run, options, model, name, path, next(iter(batches.values())))


def shortened(task: Any, batches: int) -> Any:
    """The task; one that draws its whole test set at once draws only the first batches."""
    return replace(task, test_batches=batches) if isinstance(task, GPTask) else task


def score_rows(model: ReTreever, task: Task, batches: Sequence[Batch], path: int, device: torch.device) -> Rows:
    """The score of every method with every budget: means over batches, as in `evaluate`; contexts are encoded once."""
    sums: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with torch.inference_mode():
        for batch in (batch.to(device) for batch in batches):
            memory = model.encode(batch.xc, batch.yc, batch.context_mask)
            for (method, budget), reader in methods(path).items():
                with reading(model, reader, None if budget == path else budget) as stand_in:
                    values = task.metric(model.answer(memory, batch.xt), batch).double()
                real = torch.ones_like(values) if batch.target_mask is None else batch.target_mask.double()
                score = float((values * real).sum() / real.sum())
                read, scored = (sum(part) / len(stand_in.counts) for part in zip(*stand_in.counts, strict=True))
                sums.setdefault((method, budget), []).append((score, read, scored))
    rows = []
    for (method, budget), found in sums.items():
        score, read, scored = (float(f"{sum(part) / len(found):.6g}") for part in zip(*found, strict=True))
        rows.append({"method": method, "budget": budget, "score": score, "read": read, "scored": scored})
    return rows


def methods(path: int) -> dict[tuple[str, int], Reader | None]:
    """All methods and budgets; None is the tree, a budget of one path included. All leaves have the budget 0."""
    found: dict[tuple[str, int], Reader | None] = {(ALL, 0): AllTokens()}
    for budget in budgets(path):
        found[TREE, budget] = None
        found |= {(name, budget): reader for name, reader in make_readers().items()}
    return found


def budgets(path: int) -> list[int]:
    """Budgets in tokens."""
    return [round(factor * path) for factor in FACTORS]


def time_rows(run: Run, options: RivalsBench, model: ReTreever, name: str, path: int, batches: Sequence[Batch]) -> Rows:
    """Time of reading the largest context of the batches with its queries, repeated, and of building its tree."""
    batch = max(batches, key=lambda one: one.xc.shape[1]).to(run.device)
    mask = None if batch.context_mask is None else batch.context_mask[:1]
    with torch.inference_mode():
        tree = model.encode(batch.xc[:1], batch.yc[:1], mask)
        q = model.attention.block.start(model.embed.query(batch.xt[:1]))[1]
        q = q[:, torch.arange(options.queries, device=run.device) % q.shape[1]]
        keys, values = leaves_of(tree, 0)
        where: Row = {"part": "model times", "weights": name, "n": len(keys), "m": q.shape[1]}
        rows: Rows = []
        for budget in budgets(path):
            more = None if budget == path else budget
            calls: dict[str, Sequence[Call]] = {TREE: [partial(_read_tree, q, tree, more)]}
            for method, reader in {**make_readers(), ALL: AllTokens()}.items():
                reader.prepare(keys, values, None, budget)
                calls[method] = [partial(reader.read, q[0], budget)]
            rows += timed(time_together(calls, run.device, "eager", run.limits), **where, budget=budget)
        assert tree.nodes is not None
        tokens = tree.nodes[:, tree.plan.leaf_offset :]
        tokens = tokens if tree.mask is None else tokens[:, tree.mask[0, tree.plan.leaf_offset :]]
        build: dict[str, Sequence[Call]] = {BUILD: [partial(model.attention.build, tokens)]}
        return rows + timed(time_together(build, run.device, "eager", run.limits), **where, budget=0)


def _read_tree(q: Tensor, tree: Tree, budget: int | None) -> Tensor:
    found = tree_attention(q, tree.keys, tree.values, tree.plan, tree.mask, budget=budget, log_count=tree.log_count)
    return found.output
