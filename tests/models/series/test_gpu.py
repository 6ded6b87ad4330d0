"""On a GPU: a training step of every model of series is one CUDA graph, except where its ODE solver has to wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from retreever import Batch, context_of
from retreever.models.series.base import SeriesModel
from retreever.models.series.kinds import SERIES
from retreever.models.series.latent_ode import LatentModel
from retreever.tasks.padding import Room, Sizes
from retreever.train.config import TrainConfig
from retreever.train.engine import Trainer

pytestmark = pytest.mark.gpu


class OneBatch:
    """The same series in every step, with a class at each of their points."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        values, drawn = torch.rand(2, 4, 7, 3, generator=generator)
        times = torch.rand(4, 7, generator=generator).sort(dim=1).values
        xc, yc = context_of(times, values, (drawn < 0.5) | (torch.arange(3) == 0))
        batch = Batch(xc, yc, xc, (2 * values[..., 0]).long())
        self.batches = {"cpu": batch, "cuda": batch.to("cuda")}

    def training(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        return self.batches[torch.device(device).type]

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        return Sizes(7, 7, Room(7, 7))

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Tensor, room: Room) -> Batch:
        return self.batches["cuda"]

    def validation(self) -> Iterator[Batch]:
        return iter([self.batches["cpu"]])

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        return (dist.logits.argmax(dim=-1) == batch.yt).float()


def model(name: str, **settings: Any) -> SeriesModel:
    """A model whose loss has no chance in it."""
    torch.manual_seed(0)
    sure = {"ip-nets": {"reconstruction": 0.0}}.get(name, {})
    made = SERIES[name](dim_y=6, outputs=2, head="categorical", dropout=0.0, **sure, **settings)
    if isinstance(made, LatentModel):
        with torch.no_grad():  # a spread of 0 has no gradient, and stays
            for weight in (made.to_initial[-1].weight, made.to_initial[-1].bias):
                weight[made.config.latents :].zero_()
    return made


def losses(made: SeriesModel, graph: bool) -> Tensor:
    config = TrainConfig(steps=8, batch=4, lr=1e-4, warmup=1, evaluate_every=8, precision="fp32", graph=graph)
    trainer = Trainer(made, OneBatch(), config, "cuda")
    while not trainer.done:
        trainer.advance()
    assert trainer.graphed == bool(trainer.graphs) == (graph and made.capturable)
    return trainer.terms[-8:, 0].cpu()


@pytest.mark.parametrize("name", SERIES)
def test_steps_in_a_graph_are_those_without(name: str) -> None:
    in_graph, eager = losses(model(name), True), losses(model(name), False)
    assert torch.allclose(in_graph, eager, atol=1e-4) and in_graph[-1] < in_graph[0]


@pytest.mark.parametrize("name", ["latent-ode", "latent-ode-rnn"])
def test_an_adaptive_solver_runs_without_a_graph(name: str) -> None:
    pytest.importorskip("torchdiffeq", reason="needs torchdiffeq (pip install 'retreever[ode]')")
    made = model(name, solver="adaptive")
    assert torch.allclose(losses(made, True), losses(model(name), True), atol=1e-2)
    assert made.evaluations > 0
