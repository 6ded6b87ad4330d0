"""From a module to a file: `torch.export` traces it, and the program is written as .pt2, .onnx or compiled code."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from retreever.errors import BackendError
from retreever.ops.backend import KERNELS, without

Format = Literal["onnx", "pt2", "aoti"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".aoti.pt2"}
Axes = dict[int, str]  # axes of any length, by name


def trace(part: nn.Module, arguments: Sequence[Tensor], axes: Sequence[Axes]) -> ExportedProgram:
    """The program of a module in plain torch, without weights it does not use and without traces of the source."""
    dims: dict[str, Any] = {name: Dim(name, min=1) for of_one in axes for name in of_one.values()}
    shapes = tuple({axis: dims[name] for axis, name in of_one.items()} for of_one in axes)
    try:
        with torch.no_grad(), without(*KERNELS), quiet(), redirect_stderr(StringIO()):  # torch shows whole graphs there
            program = torch.export.export(part, tuple(arguments), dynamic_shapes=shapes, strict=False)
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:  # by a module of somebody's own
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(f"model: expected operations that torch.export can trace, got {reason}") from error
    clean(program)
    return program


def clean(program: ExportedProgram) -> None:
    """Remove weights that the program never reads, since every part is traced from the whole model."""
    graph, specs = program.graph, program.graph_signature.input_specs
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in [spec for spec in specs if spec.target in program.state_dict]:
        if not nodes[spec.arg.name].users:
            graph.erase_node(nodes[spec.arg.name])
            specs.remove(spec)
            program.state_dict.pop(spec.target)
    for node in graph.nodes:
        node.meta.pop("stack_trace", None)  # would name the files of this machine
    program.graph_module.recompile()


def write(program: ExportedProgram, file: Path, form: Format, outputs: Sequence[str]) -> None:
    """Write the program in a format; `outputs` are their names, in order."""
    writers: dict[Format, Callable[[], object]] = {
        "onnx": lambda: _onnx(program, file, outputs),
        "pt2": lambda: torch.export.save(program, file),
        "aoti": lambda: _compiled(program, file),
    }
    with quiet():
        writers[form]()


def _onnx(program: ExportedProgram, file: Path, outputs: Sequence[str]) -> None:
    for package in ("onnx", "onnxscript"):
        try:
            import_module(package)
        except ImportError:
            raise BackendError(f"format: onnx needs the package {package}; pip install 'retreever[export]'") from None
    from retreever.deploy.onnx_sort import translations

    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    try:
        found = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=names, custom_translation_table=translations()
        )
    except torch.onnx.OnnxExporterError as error:
        operation = re.search(r"op='([\w.]+)'", str(error))
        what = operation[1] if operation else "an operation of this model"
        raise BackendError(f"format: torch {torch.__version__} has no ONNX for {what}; take pt2") from error
    assert found is not None
    graph = found.model.graph
    for node in graph:
        node.metadata_props.clear()  # traces of the source, a fifth of the file
        for value in node.outputs:
            if value.name in outputs:
                value.name = f"inner_{value.name}"  # the exporter would use the name twice
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    found.save(file, external_data=False)


def _compiled(program: ExportedProgram, file: Path) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    try:
        aoti_compile_and_package(program, package_path=str(file))
    except (CppCompileError, InductorError, InvalidCxxCompiler) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(f"format: aoti needs a C++ compiler that works here: {reason}") from error


def check_compiled(file: Path, arguments: Sequence[Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Delete compiled code, and raise `BackendError`, unless it gives what the model gives for an example."""
    found = torch._inductor.aoti_load_package(str(file))(*arguments)
    for name, value in wanted.items():
        if not torch.allclose(found[name].double(), value.double(), rtol=1e-3, atol=1e-3):
            file.unlink()
            raise BackendError(
                f"format: torch {torch.__version__} compiles {file.name} wrongly ({name}); take onnx or pt2"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the notes of torch's own exporters on their own parts."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
