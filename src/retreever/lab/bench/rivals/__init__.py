"""`retreever bench rivals`: trees against other ways to read few of many tokens, with the same trained weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from retreever.arguments import check_int, reject
from retreever.lab.bench.options_models import RivalsBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes
from retreever.lab.bench.rivals.attention import field_rows
from retreever.lab.bench.rivals.fields import trained_net
from retreever.lab.bench.rivals.models import model_rows
from retreever.lab.bench.rivals.tables import draw_rivals, make_tables


def measure(options: RivalsBench) -> None:
    """Run the benchmark and write its files. All is in float32, which FAISS needs."""
    exact = options.weights is None or bool(options.steps)  # a file that was named may have any training
    options = _checked(options)
    run = Run.start("rivals", replace(options, dtype="float32"))
    file = options.weights or run.file("safetensors")
    points, steps = _stages(options, run.device.type == "cpu")
    net, trained = trained_net(file, points, steps, exact, run.device)
    left_out: dict[str, str] = {}
    rows: Rows = []
    about: list[Row] = []
    with torch.inference_mode():
        for n in options.n:
            found, known = field_rows(run, options, net, n, left_out)
            rows += found
            about.append(known)
        for name in options.models:
            rows += model_rows(run, options, name, left_out)
    summary: dict[str, Any] = {"fields": about, "training": trained, "left_out": left_out}
    run.publish(rows, make_tables(run, rows, summary), partial(draw_rivals, run, rows), summary)


def _checked(options: RivalsBench) -> RivalsBench:
    """The options with their numbers checked, and smaller with `quick`."""
    for name in ("queries", "fields", "batches"):
        check_int(name, getattr(options, name), 1)
    for name in ("points", "steps"):
        for value in getattr(options, name):
            check_int(name, value, 1)
    if len(options.points) != len(options.steps):
        reject("steps", f"as many numbers as points, {len(options.points)}", options.steps)
    options = replace(options, n=check_sizes("n", options.n), budgets=check_sizes("budgets", options.budgets))
    if not options.quick:
        return options
    short = replace(options, n=options.n[:1], fields=1, batches=1)
    return short if options.steps else replace(short, points=(256,), steps=(20,))


def _stages(options: RivalsBench, cpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Points and steps of the training stages."""
    if options.points:
        return options.points, options.steps
    return ((1024,), (2000,)) if cpu else ((4096, 65536), (8000, 300))
