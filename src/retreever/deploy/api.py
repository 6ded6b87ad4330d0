"""`export`: a trained model as files that run without this package, and a JSON file that describes them."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from retreever.arguments import check_bool, check_choice, check_int, check_path, reject
from retreever.attention_inputs import check_budget
from retreever.deploy.example import example
from retreever.deploy.formats import ENDINGS, FORMATS, Axes, Format, check_compiled, trace, write
from retreever.deploy.parts import Encode, Predict, Query, Tokens
from retreever.errors import ConfigError
from retreever.files import make_folder, os_errors, write_text
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.models.sampled import SampledProcess
from retreever.models.series.base import SeriesModel
from retreever.ops.backend import KERNELS, without
from retreever.tree.build import plan_for
from retreever.tree.plan import TreePlan
from retreever.version import __version__

ABOUT = "export.json"
ONE, TWO = ("predict",), ("encode", "query")  # the parts


@dataclass(frozen=True)
class Exported:
    """Files of an exported model: the folder, the file of every part by name, and the contents of export.json."""

    folder: Path
    files: dict[str, Path]
    about: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """A module to trace, example arguments by name, and which of their axes may have any length."""

    module: nn.Module
    arguments: dict[str, Tensor]
    axes: dict[str, Axes]


def export(
    model: Model,
    out: str | Path,
    *,
    n: int,
    format: Format = "onnx",
    one: bool = False,
    budget: int | None = None,
    any_budget: bool = False,
    explain: bool = False,
    batch: int | None = 1,
    overwrite: bool = False,
) -> Exported:
    """Write a model as files that run without this package, in plain operations on float32.

    Args:
        model: a trained model; the files answer as it does in evaluation.
        out: folder for the files and export.json, which lists their inputs and outputs.
        n: most context points. Fewer are given with a mask, True where a point is real.
        format: "onnx"; "pt2" for `torch.export.load`; "aoti" for code compiled for this kind of processor
            (`torch._inductor.aoti_load_package`).
        one: write one file, `predict`, in place of two: `encode` prepares a context once, `query` answers from it as
            often as wanted. Models other than ReTreever need it.
        budget: tokens a query may read; None takes that of the model.
        any_budget: `query` takes the budget as one more input, from 1 to `budget` tokens.
        explain: `query` also returns the attention weights of the nodes read, and the policy.
        batch: number of contexts in a call; None is any number.
        overwrite: replace the files of an earlier export.

    Returns:
        The files. They take any number of queries, at least one.
    """
    check_path("out", out)
    check_budget(budget)
    check_bool("overwrite", overwrite)
    _check(model, n, format, one, budget, any_budget, explain, batch)
    model = deepcopy(model).cpu().eval().requires_grad_(False)
    folder = Path(out)
    files = {name: folder / f"{name}{ENDINGS[format]}" for name in (ONE if one else TWO)}
    taken = [str(file) for file in (*files.values(), folder / ABOUT) if file.exists()]
    if taken and not overwrite:
        raise ConfigError(f"out: expected no earlier export, got {', '.join(taken)} (--overwrite replaces them)")
    parts = _parts(model, n, one, budget, any_budget, explain, batch)
    with os_errors(folder, "cannot be written"):
        make_folder(folder)
        with TemporaryDirectory(prefix=".export-", dir=folder) as draft:
            described = {name: _write(part, Path(draft) / files[name].name, format) for name, part in parts.items()}
            _replace(Path(draft), folder)
    about = _about(model, n, format, batch, parts) | {"files": described}
    write_text(folder / ABOUT, json.dumps(about, indent=1) + "\n")
    return Exported(folder, files, about)


def _replace(draft: Path, folder: Path) -> None:
    """Put the files in `draft` in place of those of an earlier export. Without export.json it is not whole."""
    new = {file.name: file for file in draft.iterdir()}
    earlier = (folder / ABOUT).exists()
    every = [folder / f"{name}{ending}" for name in (*ONE, *TWO) for ending in ENDINGS.values()]
    if in_the_way := [str(file) for file in every if file.is_dir()]:
        raise ConfigError(f"out: expected files of an earlier export, got the folder {in_the_way[0]}")
    (folder / ABOUT).unlink(missing_ok=True)
    for name, file in new.items():
        file.replace(folder / name)
    for file in every:
        if earlier and file.name not in new:
            file.unlink(missing_ok=True)


def _check(
    model: Model,
    n: int,
    form: Format,
    one: bool,
    budget: int | None,
    any_budget: bool,
    explain: bool,
    batch: int | None,
) -> None:
    if not isinstance(model, Model):
        reject("model", "a model of this package", type(model).__name__)
    check_int("n", n, 1)
    check_choice("format", form, FORMATS)
    for name, value in (("one", one), ("any_budget", any_budget), ("explain", explain)):
        check_bool(name, value)
    if batch is not None:
        check_int("batch", batch, 1)
    if isinstance(model, SampledProcess):
        reject("model", "a model that predicts without drawing samples", type(model).__name__)
    if isinstance(model, SeriesModel) and not model.capturable:
        reject("model", "one with solver='fixed': an adaptive one takes steps that no file could hold", "'adaptive'")
    if budget is not None and not isinstance(model, ReTreever):
        reject("budget", "None for a model that builds no tree", budget)
    if (any_budget or explain) and not isinstance(model, ReTreever):
        reject("explain" if explain else "any_budget", "False for a model that builds no tree", True)
    if one and (any_budget or explain):
        reject("one", "False with any_budget or explain, which query has", one)
    if not one and not isinstance(model, ReTreever):
        reject("one", "True for a model that builds no tree", f"{one} for {type(model).__name__}")
    dtypes = {weight.dtype for weight in model.parameters()}
    if dtypes - {torch.float32}:
        reject("model", "weights of torch.float32", ", ".join(sorted(map(str, dtypes))))


def _parts(
    model: Model, n: int, one: bool, budget: int | None, any_budget: bool, explain: bool, batch: int | None
) -> dict[str, _Part]:
    """The modules to trace, each with arguments and axes in the order of its `forward`."""
    context, xt = example(model, n, batch)
    tokens = model.config.inputs == "tokens"
    rows: Axes = {0: "b"} if batch is None else {}
    queries: Axes = rows | {1: "m"}
    if one or not isinstance(model, ReTreever):
        axes = {**dict.fromkeys(context, rows), "xt": queries}
        predict = Predict(model, budget)
        return {"predict": _Part(Tokens(predict) if tokens else predict, {**context, "xt": xt}, axes)}
    encode = Tokens(Encode(model)) if tokens else Encode(model)
    plan = plan_for(n, model.config.branch, ragged=True)
    limit = _limit(model, n, budget, any_budget)
    with torch.no_grad(), without(*KERNELS):  # compiling kernels would take longer than this one call
        tree = encode(*context.values())
    arguments = {name: tree[name].contiguous() for name in ("keys", "values", "node_mask")}
    axes = {**dict.fromkeys(arguments, rows), "xt": queries}
    arguments["xt"] = xt
    if any_budget:
        arguments["budget"], axes["budget"] = torch.tensor([plan.tokens]), {}
    return {
        "encode": _Part(encode, context, dict.fromkeys(context, rows)),
        "query": _Part(Query(model, plan, limit, explain), arguments, axes),
    }


def _limit(model: ReTreever, n: int, budget: int | None, any_budget: bool) -> int | None:
    """Most tokens a query reads; None is one path."""
    own = n if model.config.retrieval == "full" else model.config.budget
    limit = own if budget is None else budget
    if any_budget:
        return n if limit is None else min(limit, n)
    return limit


def _write(part: _Part, file: Path, format: Format) -> dict[str, Any]:
    """Trace and write one part; returns its description."""
    with torch.no_grad(), without(*KERNELS):
        results: dict[str, Tensor] = part.module(*part.arguments.values())
    program = trace(part.module, tuple(part.arguments.values()), tuple(part.axes.values()))
    with os_errors(file, "cannot be written"):
        write(program, file, format, tuple(results))
    if format == "aoti":
        check_compiled(file, tuple(part.arguments.values()), results)
    inputs = {name: _shape(value, part.axes[name]) for name, value in part.arguments.items()}
    rows, xt = part.axes[next(iter(part.axes))], part.axes.get("xt")
    outputs = {name: _shape(value, rows if xt is None else xt) for name, value in results.items()}
    return {"file": file.name, "bytes": file.stat().st_size, "inputs": inputs, "outputs": outputs}


def _shape(value: Tensor, axes: Axes) -> dict[str, Any]:
    """Type and shape of a tensor; axes of any length have their names."""
    lengths = [axes.get(axis, length) for axis, length in enumerate(value.shape)]
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": lengths}


def _about(model: Model, n: int, format: Format, batch: int | None, parts: dict[str, _Part]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "retreever": __version__,
        "model": type(model).__name__,
        "format": format,
        "n": n,
        "batch": batch,
    }
    query = parts["query"].module if "query" in parts else None
    if isinstance(query, Query):
        about |= {"budget": query.budget, "any_budget": "budget" in parts["query"].arguments, "tree": _tree(query.plan)}
    return about


def _tree(plan: TreePlan) -> dict[str, Any]:
    """What is needed to find the children of a node and the leaves below it."""
    names = ("branch", "block", "depth", "offsets", "leaf_offset", "leaves", "nodes", "tokens")
    return {name: getattr(plan, name) for name in names}
