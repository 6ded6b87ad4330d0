"""Predict every next point of a long stream while the context grows: attention over the whole past, O(log n) a step.

    python examples/stream.py --data DIR --points 1000000 --out stream.json

The series are positions of four tags worn by people who walk, sit, lie and fall (UCI, "Localization Data for Person
Activity", 25 recordings): x, y and z of every tag, one series after the other, 494,580 readings in all. A longer stream
begins again with the first series, and errors are printed for both passes apart. A small model is trained on the first
40,000 readings, then frozen. Then every point of the stream is predicted from all points before it, and appended.
Errors are compared with the last value, and with a linear model of the same window fitted to the same readings.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from retreever import TreeCrossAttention
from retreever.data.activity_file import find_file, read_rows
from retreever.lab.bench.machine import describe, load_average, machine

WINDOW, DIM, TRAINED = 8, 32, 40_000


def read_stream(folder: Path) -> Tensor:
    """All readings in metres, one series (recording, tag, axis) after the other."""
    rows = read_rows(find_file(folder))
    series = []
    for recording in range(len(rows.names)):
        for tag in range(4):
            track = rows.position[(rows.recording == recording) & (rows.tag == tag)]
            series += [torch.from_numpy(track[:, axis].copy()) for axis in range(3)]
    return torch.cat(series).float()


class Forecast(nn.Module):
    """The next step of a series, from a window of steps and from a tree over all earlier windows and what followed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Sequential(nn.Linear(WINDOW + 1, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.query = nn.Sequential(nn.Linear(WINDOW, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.tca = TreeCrossAttention(DIM, 4, aggregator="mean", log_count=True)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 1))

    def answer(self, tree: object, window: Tensor) -> Tensor:
        """The step expected after each window (1, m, WINDOW), as (1, m)."""
        return self.head(self.tca(self.query(window), tree, check=False).output)[..., 0]


def train(model: Forecast, steps: Tensor, updates: int) -> None:
    """Fit the model to stretches of 256 windows, the last 32 of which are predicted from those before."""
    windows, follows = steps.unfold(0, WINDOW, 1)[:-1], steps[WINDOW:]
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(updates):
        start = torch.randint(len(follows) - 256, (32, 1))
        at = start + torch.arange(256)
        x, y = windows[at], follows[at]
        tokens = model.token(torch.cat([x, y[..., None]], dim=-1))
        tree = model.tca.build(tokens[:, :224], capacity=1)
        loss = nn.functional.smooth_l1_loss(model.answer(tree, x[:, 224:]), y[:, 224:], beta=0.1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def linear_fit(steps: Tensor) -> Tensor:
    """Weights of the window (and a constant) that predict the next step with the least squared error."""
    windows = steps.unfold(0, WINDOW, 1)[:-1]
    design = torch.cat([windows, torch.ones(len(windows), 1)], dim=1)
    return torch.linalg.lstsq(design, steps[WINDOW:, None]).solution[:, 0]


@torch.inference_mode()
def run(model: Forecast, series: Tensor, points: int, scale: float) -> list[dict[str, float]]:
    """Predict and append point after point; a row for every stretch between powers of two, and at the end of a pass."""
    passes = -(-(points + WINDOW + 2) // len(series))
    steps = torch.diff(series.repeat(passes)) / scale
    windows = steps.unfold(0, WINDOW, 1)
    weights = linear_fit(steps[:TRAINED])
    tree = model.tca.build(model.token(steps[None, None, : WINDOW + 1]), capacity=1)
    ends = sorted({1024 << power for power in range(40)} | {points, len(series)})
    rows, start = [], 1
    for end in (end for end in ends if end <= points):
        guesses, started = torch.empty(end - start), perf_counter()
        for point in range(start, end):
            guesses[point - start] = model.answer(tree, windows[None, None, point])[0, 0]
            token = model.token(steps[None, None, point : point + WINDOW + 1])  # the point has come
            tree = model.tca.append(tree, token, in_place=True)
        seconds = (perf_counter() - started) / (end - start)
        truth = steps[start + WINDOW : end + WINDOW]
        linear = windows[start:end] @ weights[:-1] + weights[-1]
        errors = [scale * float((guess - truth).abs().mean()) for guess in (guesses, linear, torch.zeros(1))]
        row = {"points": end, "ms": 1e3 * seconds, "tree": errors[0], "linear": errors[1], "last value": errors[2]}
        print("  ".join(f"{name} {value:,.6g}" for name, value in row.items()), flush=True)
        rows.append(row)
        start = end
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Train the model, run the stream and print a line for every doubling of its length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of ConfLongDemo_JSI.txt or its .gz")
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the rows")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    load = load_average()
    series = read_stream(options.data)
    scale = float(torch.diff(series[:TRAINED]).std())
    model = Forecast()
    train(model, torch.diff(series[:TRAINED]) / scale, options.updates)
    rows = run(model.eval(), series, options.points, scale)
    if options.out is not None:
        about = {"seed": options.seed, "updates": options.updates, "machine": describe(machine()), "load": load}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
