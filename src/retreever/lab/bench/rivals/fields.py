"""Attention trained without a tree: noisy 2-D fields, a small network with `nn.MultiheadAttention`, and its training.

A field is a sum of 24 random waves on [-1, 1]^2. Context points have its value with noise of 0.1; the network predicts
the value without noise at other points. Fields for training and for evaluation come from different generators.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.cross_attention import CrossAttention
from retreever.errors import CheckpointError
from retreever.files import os_errors, write_bytes
from retreever.tasks.seeds import derive_seed, stream
from retreever.train.checkpoint import check_fits

WAVES, NOISE = 24, 0.1
WIDTH, HEADS, FREQUENCIES = 64, 4, 32
BATCH, QUERIES, RATE, WARMUP, REPORTS = 8, 128, 2e-3, 100, 5


class Fields(NamedTuple):
    """Context points with noisy values, and queries with true values."""

    xc: Float[Tensor, "b n 2"]
    yc: Float[Tensor, "b n 1"]
    xt: Float[Tensor, "b m 2"]
    yt: Float[Tensor, "b m 1"]


def draw_fields(count: int, n: int, m: int, generator: torch.Generator, device: torch.device) -> Fields:
    """`count` fields with `n` context points and `m` queries each."""
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    frequency = 4 * torch.randn(count, 2, WAVES, **where).to(device)
    phase = 2 * math.pi * torch.rand(count, 1, WAVES, **where).to(device)
    amplitude = (torch.randn(count, WAVES, 1, **where) / math.sqrt(WAVES / 2)).to(device)
    points = (2 * torch.rand(count, n + m, 2, **where) - 1).to(device)
    noise = NOISE * torch.randn(count, n, 1, **where).to(device)
    values = (points @ frequency + phase).sin() @ amplitude
    return Fields(points[:, :n], values[:, :n] + noise, points[:, n:], values[:, n:])


def evaluation_field(number: int, n: int, m: int, device: torch.device) -> Fields:
    """A field for evaluation, the same on every device."""
    return draw_fields(1, n, m, stream(f"fields-{n}", "test", number), device)


class FieldNet(nn.Module):
    """Fourier features of coordinates, a token per context point, one cross attention over all tokens, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(3 * torch.randn(2, FREQUENCIES))
        self.context = _perceptron(2 * FREQUENCIES + 1, WIDTH)
        self.query = _perceptron(2 * FREQUENCIES, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = _perceptron(WIDTH, 1)

    def tokens(self, xc: Tensor, yc: Tensor) -> Float[Tensor, "b n d"]:
        """Tokens of context points."""
        return self.context(torch.cat([self._features(xc), yc], dim=-1))

    def queries(self, xt: Tensor) -> Float[Tensor, "b m d"]:
        """Queries at points."""
        return self.query(self._features(xt))

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor) -> Float[Tensor, "b m 1"]:
        tokens = self.tokens(xc, yc)
        return self.head(self.attention(self.queries(xt), tokens, tokens, need_weights=False)[0])

    def projected(self, field: Fields) -> tuple[Tensor, Tensor, Tensor]:
        """Query heads (m, h, e), keys and values (n, h, e) of one field."""
        block = CrossAttention.from_multihead(self.attention).block
        keys, values = block.key_values(self.tokens(field.xc, field.yc))
        return block.start(self.queries(field.xt))[1][0], keys[0], values[0]

    def finish(self, attended: Float[Tensor, "m h e"]) -> Float[Tensor, "m 1"]:
        """Predictions from the attended values of all heads."""
        return self.head(self.attention.out_proj(attended.flatten(1)))

    def _features(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


def train_net(points: tuple[int, ...], steps: tuple[int, ...], device: torch.device) -> FieldNet:
    """Train on fresh fields: `steps` with so many context `points`, stage after stage, over one cosine schedule."""
    seed = derive_seed("fields", "train", 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("fields", "init", 0))
        net = FieldNet().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    stages = [n for n, count in zip(points, steps, strict=True) for _ in range(count)]
    started = perf_counter()
    for step, n in enumerate(stages):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / len(stages)))
        field = draw_fields(BATCH, n, QUERIES, generator, device)
        loss = F.mse_loss(net(*field[:3]), field.yt)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if (step + 1) % max(1, len(stages) // REPORTS) == 0:
            seconds = perf_counter() - started
            line = f"fields, {n:,} points: step {step + 1:,} of {len(stages):,}, RMSE {loss.item() ** 0.5:.3f}"
            print(f"{line}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return net.eval()


def trained_net(
    file: Path, points: tuple[int, ...], steps: tuple[int, ...], exact: bool, device: torch.device
) -> tuple[FieldNet, dict[str, Any]]:
    """The network in `file` and how it was trained; trained now, and saved, where there is no such file.

    With `exact`, a file must agree with `points` and `steps`.
    """
    if file.exists():
        net, about = _load(file)
        asked = {"points": list(points), "steps": list(steps)}
        if exact and asked != {name: about[name] for name in asked}:
            reject("weights", f"a file of points {points} and steps {steps}, or a new one", f"{file} of {about}")
        return net.to(device).eval(), about
    started = perf_counter()
    net = train_net(points, steps, device)
    seconds = round(perf_counter() - started, 1)
    about = {"points": list(points), "steps": list(steps), "seconds": seconds, "device": device.type}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}
    write_bytes(file, safetensors.torch.save(tensors, {"trained": json.dumps(about)}), CheckpointError)
    return net, about


def _load(file: Path) -> tuple[FieldNet, dict[str, Any]]:
    net = FieldNet()
    try:
        with os_errors(file, "cannot be read", CheckpointError), safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            about = json.loads((opened.metadata() or {})["trained"])
        check_fits(file, tensors, net.state_dict())
        net.load_state_dict(tensors)
        return net, {name: about[name] for name in ("points", "steps", "seconds", "device")}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: expected weights of the fields, got {error!r}") from None


def _perceptron(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, WIDTH), nn.GELU(), nn.Linear(WIDTH, width_out))
