"""Exported files beside PyTorch on a CPU: bytes, time to prepare a context and to answer, largest difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from retreever.arguments import check_int
from retreever.deploy.api import export
from retreever.deploy.formats import Format, quiet
from retreever.deploy.parts import Encode, outputs
from retreever.errors import BackendError
from retreever.lab.bench import figures
from retreever.lab.bench.options_models import ExportBench
from retreever.lab.bench.report import Row, Rows, Run, progress, quantity
from retreever.lab.bench.timing import Call, time_together
from retreever.lab.tables import Table
from retreever.models.retreever import ReTreever
from retreever.pretrained.load import load_pretrained
from retreever.tree.build import plan_for
from retreever.tree.value import Tree

Part = Callable[..., Mapping[str, Tensor]]  # a loaded file: tensors by position, named tensors out
TORCH = "PyTorch"
NAMES: dict[Format, str] = {"onnx": "ONNX Runtime", "pt2": "torch.export", "aoti": "AOTInductor"}
TREE = ("keys", "values", "node_mask")


def measure(options: ExportBench) -> None:
    """Run the benchmark and write its files."""
    check_int("n", options.n, 1)
    check_int("queries", options.queries, 1)
    run = Run.start("export", replace(options, dtype="float32", device="cpu"))
    rows = [row for name in options.models for row in model_rows(run, options, name)]
    run.publish(rows, [export_table(run, options, rows)], partial(draw_export, run, rows), {})


def model_rows(run: Run, options: ExportBench, name: str) -> Rows:
    """A row for PyTorch and for every format, all timed in turn on the same context."""
    model = load_pretrained(name)
    assert isinstance(model, ReTreever)
    context, xt = example(model, options.n, options.queries)
    with TemporaryDirectory() as folder, torch.no_grad():
        parts, sizes = loaded(model, options, Path(folder))
        asked: dict[str, Part] = {}
        for method, part in parts.items():
            tree = part["encode"](*context)
            asked[method] = partial(part["query"], *(tree[key] for key in TREE))
        calls: dict[str, dict[str, list[Call]]] = {
            "encode": {method: [partial(part["encode"], *context)] for method, part in parts.items()},
            "one": {method: [partial(call, xt[:, :1])] for method, call in asked.items()},
            "many": {method: [partial(call, xt)] for method, call in asked.items()},
        }
        times = {what: time_together(methods, run.device, "eager", run.limits) for what, methods in calls.items()}
        progress(f"{name}, one query", times["one"])
        found = {method: call(xt) for method, call in asked.items()}
    rows: Rows = []
    for method in parts:
        error = max(difference(found[method][key], value) for key, value in found[TORCH].items())
        row: Row = {"model": name, "method": method, "bytes": sizes[method], "error": error}
        rows.append(row | {f"{what}_us": 1e6 * times[what][method].seconds for what in times})
    return rows


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative where numbers are larger than one."""
    return float(((found - wanted).abs() / wanted.abs().clamp_min(1)).max())


def loaded(
    model: ReTreever, options: ExportBench, folder: Path
) -> tuple[dict[str, dict[str, Part]], dict[str, dict[str, int]]]:
    """Both parts in PyTorch and in every format, and the bytes of the files."""
    parts: dict[str, dict[str, Part]] = {TORCH: in_torch(model, options.n)}
    sizes: dict[str, dict[str, int]] = {TORCH: {}}
    for form in options.formats:
        made = export(model, folder / form, n=options.n, format=form)
        parts[NAMES[form]] = {part: LOADERS[form](file) for part, file in made.files.items()}
        sizes[NAMES[form]] = {part: about["bytes"] for part, about in made.about["files"].items()}
    return parts, sizes


def example(model: ReTreever, n: int, m: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A context of n points of a smooth function, or of n symbols, and m queries."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(1, n, dtype=torch.bool)
    if config.inputs == "sequence":
        x = torch.arange(n + m, dtype=torch.float32)[None, :, None]
        return (x[:, :n], torch.randint(config.dim_y, (1, n), generator=generator), mask), x[:, n:]
    x = 2 * torch.rand(1, n + m, config.dim_x, generator=generator) - 1
    y = torch.stack([(x.sum(dim=2) + k).sin() / 2 for k in range(config.dim_y)], dim=2)
    return (x[:, :n], y[:, :n], mask), x[:, n:]


def in_torch(model: ReTreever, n: int) -> dict[str, Part]:
    """The model itself, with the kernels of this package, in the shape of the files."""
    plan = plan_for(n, model.config.branch, ragged=True)

    def query(keys: Tensor, values: Tensor, node_mask: Tensor, xt: Tensor) -> dict[str, Tensor]:
        return outputs(model.answer(Tree(plan, None, node_mask, keys, values), xt))

    return {"encode": Encode(model), "query": query}


def load_onnx(file: Path) -> Part:
    """A file in ONNX Runtime, with as many threads as torch has."""
    try:
        import onnxruntime
    except ImportError:
        raise BackendError("formats: onnx needs onnxruntime; pip install 'retreever[export]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session: Any = onnxruntime.InferenceSession(str(file), options)
    names = [value.name for value in session.get_inputs()]
    results = [value.name for value in session.get_outputs()]

    def call(*arguments: Tensor) -> dict[str, Tensor]:
        feeds = {name: value.numpy() for name, value in zip(names, arguments, strict=True)}
        return dict(zip(results, map(torch.from_numpy, session.run(None, feeds)), strict=True))

    return call


def load_pt2(file: Path) -> Part:
    """A program of torch.export, run by torch."""
    with quiet():
        return torch.export.load(file).module()


def load_aoti(file: Path) -> Part:
    """Compiled code."""
    return torch._inductor.aoti_load_package(str(file))


LOADERS: dict[Format, Callable[[Path], Part]] = {"onnx": load_onnx, "pt2": load_pt2, "aoti": load_aoti}


def export_table(run: Run, options: ExportBench, rows: Rows) -> Table:
    """Table of sizes, times and differences."""
    many = options.queries
    columns = ("model", "runs in", "encode, MB", "query, MB", "us a context", "us for 1 query", f"us a query of {many}")
    lines = []
    for row in rows:
        size = [f"{row['bytes'][part] / 1e6:.2f}" if row["bytes"] else None for part in ("encode", "query")]
        time = (quantity(row["encode_us"]), quantity(row["one_us"]), quantity(row["many_us"] / many))
        lines.append((row["model"], row["method"], *size, *time, f"{row['error']:.0e}" if row["bytes"] else None))
    notes = (
        run.footer(),
        f"contexts of {options.n} points, one context a call, one path a query",
        "difference: the largest from PyTorch's of any mean, standard deviation or logit; relative if these exceed 1",
        "PyTorch runs the kernels of this package, the others plain operations",
    )
    return Table("Exported models beside PyTorch", (*columns, "difference"), tuple(lines), notes)


def draw_export(run: Run, rows: Rows, file: Path) -> Path:
    """Draw bars of the time for one query."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        colour = figures.TREE if row["method"] == TORCH else figures.FULL
        groups.setdefault(row["model"], {})[row["method"]] = (row["one_us"], colour)
    where = run.machine["processor"]
    return figures.draw_bars(groups, file, f"One query from a prepared context, {where}", "microseconds")
