"""Read the cross attention of a trained decoder through a tree, without training it again.

The task: a field over the plane is known at noisy points, and its values are wanted at other places. The decoder is an
`nn.TransformerDecoderLayer`; its memory holds one state per known point. It is trained on small contexts with attention
over all of them. Then its `multihead_attn` is replaced by a `TreeMultihead`, and fields of 4,096 points are predicted
with attention over all tokens and through trees. Run `python examples/convert_decoder.py`; it takes about a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retreever import TreeMultihead, leaf_order

DIM, HEADS, WAVES, NOISE = 64, 4, 6, 0.1


class Field(NamedTuple):
    """Noisy values `yc` at places `xc`, and true values `yt` at places `xt`."""

    xc: Tensor
    yc: Tensor
    xt: Tensor
    yt: Tensor


def sample(b: int, n: int, m: int, generator: torch.Generator) -> Field:
    """`b` fields, each the sum of a few waves, known at `n` places and asked for at `m` others."""
    x = 2 * torch.rand(b, n + m, 2, generator=generator) - 1
    frequency = 3 * torch.randn(b, WAVES, 2, generator=generator)
    phase = 2 * torch.pi * torch.rand(b, 1, WAVES, generator=generator)
    y = (x @ frequency.mT + phase).sin().sum(dim=2, keepdim=True) * (2 / WAVES) ** 0.5
    noisy = y[:, :n] + NOISE * torch.randn(b, n, 1, generator=generator)
    return Field(x[:, :n], noisy, x[:, n:], y[:, n:])


class Embed(nn.Module):
    """Sines and cosines of a place, and the value there if it is known, as one token."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(4 * torch.randn(2, DIM // 2))
        self.layers = nn.Sequential(nn.Linear(DIM + values, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, *y: Tensor) -> Tensor:
        angle = x @ self.frequency
        return self.layers(torch.cat([angle.sin(), angle.cos(), *y], dim=2))


class Model(nn.Module):
    """Embeds points, decodes the queries against them, predicts one value per query."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.places = Embed(values=1), Embed(values=0)
        self.decoder = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, dropout=0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 1))

    def forward(self, field: Field) -> Tensor:
        return self.head(self.decoder(self.places(field.xt), self.points(field.xc, field.yc)))


def train(model: Model, steps: int, generator: torch.Generator) -> None:
    """Train on fields of 512 points with attention over all of them."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 2 * (1 - step / steps)))
    for _ in range(steps):
        field = sample(8, 512, 64, generator)
        loss = (model(field) - field.yt).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def rmse(model: Model, field: Field) -> float:
    """Root of the mean squared error of the predictions."""
    return float((model(field) - field.yt).square().mean().sqrt())


@torch.no_grad()
def inputs_of(attention: nn.Module, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """The queries and the context that `attention` is called with during `run()`."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
    run()
    hook.remove()
    return seen[-1]


def in_kd_order(field: Field) -> Field:
    """The same field, its points sorted so that neighbours follow one another."""
    order = leaf_order("kd", field.xc)[..., None]
    return field._replace(xc=field.xc.take_along_dim(order, dim=1), yc=field.yc.take_along_dim(order, dim=1))


def compare(model: Model, field: Field, budgets: list[int]) -> list[tuple[str, int, float]]:
    """Name of the attention, tokens it reads, RMSE of the task: over all tokens, then through trees."""
    attention = model.decoder.multihead_attn
    rows = [("all tokens", field.xc.shape[1], rmse(model, field))]
    trees = (("keys", "keys", field), ("given, k-d", "given", in_kd_order(field)), ("given, random", "given", field))
    for name, order, points in trees:
        for budget in budgets:
            model.decoder.multihead_attn = TreeMultihead(attention, order=order, budget=budget)
            rows.append((f"tree, order {name}", budget, rmse(model, points)))
    model.decoder.multihead_attn = attention
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Train, convert, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("seed", 0), ("steps", 1500), ("tokens", 4096), ("queries", 256), ("fields", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    settings = parser.parse_args(arguments)
    torch.manual_seed(settings.seed)
    model, started = Model(), time.perf_counter()
    train(model, settings.steps, torch.Generator().manual_seed(settings.seed + 1))
    model.eval()
    print(f"seed {settings.seed}, {settings.steps} steps in {time.perf_counter() - started:.0f} s")
    field = sample(settings.fields, settings.tokens, settings.queries, torch.Generator().manual_seed(settings.seed + 2))
    budgets = [round(settings.tokens * share) for share in (0.01, 0.02, 0.04, 0.08)]
    print(f"\n{'attention':<26} tokens   share    RMSE")
    for name, tokens, score in compare(model, field, budgets):
        print(f"{name:<26} {tokens:>6,} {100 * tokens / settings.tokens:>6.1f}% {score:>7.4f}")
    attention = model.decoder.multihead_attn
    queries, context = inputs_of(attention, lambda: model(field))
    tree = TreeMultihead(attention).tca
    print("\nfidelity of the attention alone, order keys")
    print(tree.fidelity(queries, context, budgets=(None, *budgets), error=0.02))


if __name__ == "__main__":
    main()
