"""Files and functions stay small enough to be read at a glance."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median, quantiles

import pytest

import retreever

ROOT = Path(retreever.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_kernel(path: Path) -> bool:
    return path.stem.endswith(("_triton", "_numba"))


def body_lines(function: Function) -> int:
    """Lines of a function without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions_of(path: Path) -> dict[str, int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return {f"{node.name}, line {node.lineno}": body_lines(node) for node in functions}


def percentile_90(values: list[int]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]


def test_body_lines_are_counted_without_signature_and_docstring() -> None:
    (function,) = ast.parse('def f(\n  a,\n):\n  """One.\n\n  Two.\n  """\n  b = a\n\n  return b\n').body
    assert isinstance(function, ast.FunctionDef) and body_lines(function) == 3


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=map(name_of, FILES),
)
def test_no_file_is_long(path: Path) -> None:
    assert lines_of(path) <= (400 if is_kernel(path) else 300)


def test_nine_of_ten_files_have_at_most_250_lines() -> None:
    assert percentile_90([lines_of(path) for path in FILES if not is_kernel(path)]) <= 250


@pytest.mark.parametrize("path", FILES, ids=map(name_of, FILES))
def test_no_function_is_long(path: Path) -> None:
    limit = 120 if is_kernel(path) else 60
    assert {name: lines for name, lines in functions_of(path).items() if lines > limit} == {}


def test_most_functions_are_short() -> None:
    """Half have at most 12 lines, nine of ten at most 30."""
    lengths = [lines for path in FILES if not is_kernel(path) for lines in functions_of(path).values()]
    assert median(lengths) <= 12 and percentile_90(lengths) <= 30


def test_the_whole_package_stays_small() -> None:
    """The library, and the lab above it."""
    lab = [path for path in FILES if name_of(path).startswith(("lab/", "cli.py"))]
    library = [path for path in FILES if path not in lab]
    assert sum(map(lines_of, library)) <= 20_820
    assert sum(map(lines_of, FILES)) <= 31_450
