"""A whole training step as one CUDA graph: data, forward, backward, clipping and optimiser in a single launch.

Small models leave a GPU waiting for Python; replaying a graph removes that wait. Everything the step needs lives in
fixed buffers: random numbers come from generators registered with the graph, the learning rate is a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.objective import Loss
from retreever.train.config import TrainConfig
from retreever.train.engine import Model, Task, learning_rate


class GraphedStep:
    """`run()` does one training step of `model` on `task`; `loss` then holds what it was, on the device.

    Args:
        model: already on a CUDA device.
        task: samples batches of one size on the device.
        config: of the training run.
        compile: let torch.compile fuse the model before the graph is captured.
    """

    def __init__(self, model: Model, task: Task, config: TrainConfig, compile: bool = False) -> None:
        self.device = next(model.parameters()).device
        if self.device.type != "cuda":
            reject("model", "parameters on a CUDA device", self.device)
        self.model, self.task, self.config, self.step = model, task, config, 0
        self.generator = torch.Generator(self.device).manual_seed(task.training(config.seed).initial_seed())
        self.rate = torch.zeros((), device=self.device)
        self.optimiser = torch.optim.AdamW(
            model.parameters(),
            lr=self.rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=True,
        )
        self._loss_of = torch.compile(model.loss, fullgraph=True) if compile else model.loss
        self.graph, self.loss = self._capture()

    def run(self) -> None:
        """One step: set the learning rate, replay."""
        self.rate.fill_(self.config.lr * learning_rate(self.config, self.step))
        self.graph.replay()
        self.step += 1

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Loss]:
        """Warm up on a side stream, put everything back as it was, then record."""
        self.model.train()
        weights = [p.detach().clone() for p in self.model.parameters()]
        states = self.generator.get_state(), torch.cuda.get_rng_state(self.device)
        side: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):  # allocates gradients and optimiser state; the learning rate is 0, so nothing moves
                self._train()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            loss = self._train()
        self._restore(weights, states)
        return graph, loss

    def _restore(self, weights: list[Tensor], states: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        self.generator.set_state(states[0])
        torch.cuda.set_rng_state(states[1], self.device)

    def _train(self) -> Loss:
        batch = self.task.sample(self.config.batch, self.generator, self.device)
        loss: Loss = self._loss_of(batch)
        self.optimiser.zero_grad(set_to_none=False)
        torch.autograd.backward(loss.total)
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        self.optimiser.step()
        return Loss(*(part.detach() for part in loss))
