"""A whole training step as one CUDA graph: data, forward, backward, clipping and optimiser in a single launch.

Small models leave a GPU waiting for Python; replaying a graph removes that wait. Everything the step needs lives in
fixed buffers: random numbers come from generators registered with the graph, the learning rate is a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from retreever.train.engine import Trainer

WARM_UP = 3


def capture(trainer: Trainer, other: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """Record `trainer.train()` on the current stream; weights, optimiser and random streams stay as they were.

    The steps that warm up allocate optimiser state, compile kernels and copy data to the device. Graphs of one trainer
    never run at once, so they share the memory of `other`.
    """
    streams = (trainer.stream, trainer.paths, trainer.dropout.generator)
    states = [stream.get_state() for stream in streams]
    kept = [(tensor, tensor.clone()) for tensor in _mutable(trainer)]
    trainer.queue.wait_stream(torch.cuda.default_stream(trainer.device))
    for _ in range(WARM_UP):
        trainer.train()
    trainer.optimiser.zero_grad(set_to_none=True)  # gradients shall live in the graph's own memory
    graph = torch.cuda.CUDAGraph()
    for stream in streams[:2]:  # the third is torch's own at the moment, which registers itself
        graph.register_generator_state(stream)
    with torch.cuda.graph(graph, stream=trainer.queue, pool=None if other is None else other.pool()):
        trainer.train()
    _restore(trainer, kept)
    for stream, state in zip(streams, states, strict=True):
        stream.set_state(state)
    return graph


def _mutable(trainer: Trainer) -> list[Tensor]:
    """All a step writes to: weights, their optimiser state, the record of losses, the learning rate."""
    weights = [parameter.detach() for parameter in trainer.model.parameters()]
    return [*weights, *_moments(trainer), trainer.terms]


def _moments(trainer: Trainer) -> list[Tensor]:
    return [value for state in trainer.optimiser.state.values() for value in state.values()]


def _restore(trainer: Trainer, kept: list[tuple[Tensor, Tensor]]) -> None:
    """In place, since the graph knows addresses; state that did not exist before is zero, as at a first step."""
    old = {id(tensor) for tensor, _ in kept}
    for value in _moments(trainer):
        if id(value) not in old:
            value.zero_()
    for tensor, value in kept:
        tensor.copy_(value)
