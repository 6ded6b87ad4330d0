"""What importing loads, which way imports point, what the source never does, and what every public name has."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import retreever

ROOT = Path(retreever.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
# Data flows from left to right; a module imports from its own group or from groups to its left. The lab comes last:
# nothing in the library imports it.
GROUPS = (
    "version", "errors", "arguments", "files", "checks", "tree.plan", "tree.budget", "tree.selected", "ops", "batch",
    "data", "tasks", "nn", "tree", "sharded",
    "results", "attention_inputs", "attention_build", "attention_search", "growing_inputs", "growing",
    "cross_attention", "masses", "attention_growing", "fidelity", "attention", "tree_multihead", "explanation",
    "detours", "objective", "search_loss", "models", "scaler", "deploy", "botorch", "train", "saving",
    "pretrained", "lab", "cli",
)  # fmt: skip
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
each_file = pytest.mark.parametrize("path", FILES, ids=NAMES)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def fresh_python(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_optional_dependency() -> None:
    """Not even when every public name is used."""
    heavy = ("triton", "numba", "matplotlib", "rich", "tyro", "PIL", "sklearn", "botorch", "gpytorch")
    code = f"""
import sys, retreever
assert all(hasattr(retreever, name) for name in retreever.__all__)
print([name for name in {heavy} if name in sys.modules])
"""
    assert fresh_python(code) == "[]"


def test_the_reference_works_without_triton_and_numba() -> None:
    """With both blocked, a model still trains, and an explicit request for a blocked backend says so."""
    code = """
import sys
sys.modules["triton"] = sys.modules["numba"] = None
import torch, retreever
model = retreever.ReTreever(dim=16, layers=1, hidden=16)
x = torch.randn(2, 9, 1)
model.loss(retreever.Batch(x, x, x, x)).total.backward()
assert model.predict(x, x, x).mean.isfinite().all()
for impl in ("triton", "numba"):
    try:
        tca = retreever.TreeCrossAttention(16, impl=impl)
        tca(torch.randn(2, 3, 16), tca.build(torch.randn(2, 9, 16)))
    except retreever.RetreeverError as error:
        assert "\\n" not in str(error), error
    else:
        raise SystemExit(impl + " ran without " + impl)
print("ok")
"""
    assert fresh_python(code) == "ok"


def test_reference_models_import_no_kernel() -> None:
    """With every kernel module made to raise on import, all models train and predict."""
    code = """
import sys
from importlib.abc import MetaPathFinder

class NoKernels(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("retreever.ops.") and name.endswith(("_triton", "_numba")):
            raise RuntimeError("a kernel was imported: " + name)

sys.meta_path.insert(0, NoKernels())
import torch, retreever
from retreever import Batch, PerceiverIO, ReTreever, TransformerCA

x = torch.randn(2, 19, 1)
mask = torch.arange(19) < torch.tensor([[19], [7]])
for kind in (ReTreever, TransformerCA, PerceiverIO):
    for encoder in ("transformer", "identity", "local", "linformer", "chordmixer"):
        model = kind(dim=16, layers=1, hidden=16, encoder=encoder, impl="reference", dropout=0.1)
        model.loss(Batch(x, x, x, x, mask)).total.backward()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
        with torch.inference_mode():
            assert model.eval().predict(x, x, x, mask).mean.isfinite().all()
print("ok")
"""
    assert fresh_python(code) == "ok"


def group_of(module: str) -> str | None:
    """The group of a dotted module name; None for the package itself, which only re-exports."""
    name = module.partition(".")[2]
    whole = [group for group in GROUPS if name == group or name.startswith(f"{group}.")]
    return max(whole, key=len) if whole else name.partition(".")[0] or None


def imported_modules(tree: ast.AST, module: str) -> Iterator[str]:
    """Every retreever module the file imports, anywhere in it: inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "retreever")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: relative import"
            if node.module == "retreever":
                yield from (f"retreever.{alias.name}" for alias in node.names)
            elif (node.module or "").startswith("retreever."):
                yield str(node.module)


@each_file
def test_imports_point_to_the_left(path: Path) -> None:
    relative = path.relative_to(ROOT).with_suffix("")
    if relative.name in ("__init__", "__main__") and len(relative.parts) == 1:
        return  # the public names come from everywhere
    group = group_of(".".join(("retreever", *relative.parts)).removesuffix(".__init__"))
    assert group in GROUPS, f"{group}: give it a place in the order of groups"
    for name in imported_modules(TREES[path], str(relative)):
        target = group_of(name)
        assert target in GROUPS, f"imports {name}"
        assert GROUPS.index(target) <= GROUPS.index(group), f"imports {name}, which lies to its right"


def test_backends_import_neither_the_reference_nor_each_other() -> None:
    backends = ("_triton", "_numba")
    for path in (ROOT / "ops").rglob("*.py"):
        for own in backends:
            if path.stem.endswith(own):
                names = [name for name in imported_modules(TREES[path], path.stem) if ".ops." in name]
                other = next(backend for backend in backends if backend != own)
                assert not [n for n in names if n.endswith((other, "reference", "api", "backend"))], path.name


def test_kernels_are_imported_by_launchers_alone() -> None:
    """Whoever else needs one imports it when it is called, so that plain torch works without triton and numba."""
    for path, tree in TREES.items():
        if path.stem.endswith(("_triton", "_numba")):
            continue
        above = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {name for node in above for name in imported_modules(node, path.stem)}
        assert not [name for name in named if name.endswith(("_triton", "_numba"))], path.name


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


@each_file
def test_the_source_never_runs_foreign_code(path: Path) -> None:
    """No pickle, no torch.load, no eval or exec, no shell, no yaml.load."""
    for node in ast.walk(TREES[path]):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"pickle", "dill", "cloudpickle"}, where
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in ("pickle", "dill", "cloudpickle"), where
            assert not (node.module == "torch" and {a.name for a in node.names} & {"load"}), where
        if isinstance(node, ast.Call):
            assert dotted(node.func) not in ("eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen"), where
            shell = [keyword.value for keyword in node.keywords if keyword.arg == "shell"]
            assert not any(not (isinstance(v, ast.Constant) and v.value is False) for v in shell), where


def test_the_public_names_are_pinned() -> None:
    """Adding, renaming or removing one is a decision: change this list with it."""
    assert sorted(retreever.__all__) == [
        "ANP", "BANP", "BNP", "BackendError", "Batch", "CANP", "CMANP", "CNP", "CheckpointError", "ConfigError",
        "CrossAttention", "DataError", "Fidelity", "GRUD", "IPNets", "InputError", "LBANP", "LatentODE", "LatentODERNN",
        "Loss", "MTANDEnc", "NP", "ODERNN", "ObjectiveConfig", "Part", "PerceiverIO", "RNNDecay", "RNNImpute",
        "RandomGuess", "ReTreever", "RetreeverError", "Scaled", "Scaler", "SeFT", "ShardedTree", "TNPD",
        "TransformerCA", "Tree", "TreeCrossAttention", "TreeMultihead", "TreePlan", "__version__", "collate",
        "context_of", "explain", "export", "full_attention", "leaf_order", "load_model", "load_pretrained",
        "mass_loss", "merge_parts", "save_model", "search_with_detours", "tree_attention", "tree_loss",
    ]  # fmt: skip
    assert all(hasattr(retreever, name) for name in retreever.__all__) and not hasattr(retreever, "nothing_like_it")


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions and classes of the module and methods of its classes whose names do not start with an underscore."""
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, Function) and (not inner.name.startswith("_") or inner.name == "__init__"):
                yield f"{node.name}.{inner.name}", inner


def is_typed(function: Function) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    arguments += [extra for extra in (function.args.vararg, function.args.kwarg) if extra is not None]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return function.returns is not None and all(argument.annotation is not None for argument in named)


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=NAMES,
)
def test_everything_public_is_documented(path: Path) -> None:
    """The file, its classes and functions; `forward` and `__init__` are described by their class."""
    assert ast.get_docstring(TREES[path])
    missing = [
        name
        for name, node in public_definitions(TREES[path])
        if name.rpartition(".")[2] not in ("forward", "__init__") and not ast.get_docstring(node)
    ]
    assert missing == []


def is_compiled(path: Path, function: Function) -> bool:
    """Kernels are typed by what they are called with; their compilers read annotations in their own way."""
    return path.stem.endswith(("_triton", "_numba")) and bool(function.decorator_list)


@each_file
def test_everything_public_is_typed(path: Path) -> None:
    functions = ((name, node) for name, node in public_definitions(TREES[path]) if isinstance(node, Function))
    assert [name for name, node in functions if not (is_typed(node) or is_compiled(path, node))] == []
