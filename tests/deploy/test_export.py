"""Exported files give what the models give, in ONNX Runtime and in a process without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever import NP, ReTreever, TransformerCA, TreeCrossAttention, export, load_pretrained
from retreever.cli import main
from retreever.deploy.formats import trace
from retreever.errors import BackendError, RetreeverError
from retreever.lab.export import Export

MODELS = {"gp": 9, "gp-lbanp": 3, "gp-tnpd": 3, "emnist": 5, "activity": 4, "copy-256": 4, "copy-1024": 3}
LARGE = {"gp": 48, "emnist": 200, "activity": 50, "copy-256": 128}  # contexts as large as in training


def session(file: Path) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install 'retreever[export]'")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(str(file), options)


def run(file: Any, **inputs: Tensor) -> dict[str, Tensor]:
    found = file.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {output.name: torch.from_numpy(value) for output, value in zip(file.get_outputs(), found, strict=True)}


def smooth(model: Any, n: int, m: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Points of a smooth function, or symbols at positions, as the models were trained on."""
    config = model.config
    if config.inputs == "sequence":
        x = torch.arange(n + m, dtype=torch.float32)[None, :, None]
        return x[:, :n], torch.randint(config.dim_y, (1, n), generator=generator), x[:, n:]
    x = 2 * torch.rand(1, n + m, config.dim_x, generator=generator) - 1
    waves = torch.stack([(x.sum(dim=2) + k).sin() / 2 for k in range(config.dim_y)], dim=2)
    return x[:, :n], waves[:, :n], x[:, n:]


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    """Every shipped model, any number of queries, contexts of 1 to n points anywhere among the slots."""
    model, most = load_pretrained(name), MODELS[name]
    file = session(export(model, tmp_path, n=most, one=True).files["predict"])
    generator = torch.Generator().manual_seed(0)
    for n, m in [(n, m) for n in range(1, most + 1) for m in (1, 2, 17)]:
        x, y, xt = smooth(model, n, m, generator)
        slots = torch.randperm(most, generator=generator)[:n].sort().values
        xc, yc = torch.full((1, most, x.shape[2]), 9.0), y.new_full((1, most, *y.shape[2:]), 9)
        mask = torch.zeros(1, most, dtype=torch.bool)
        xc[:, slots], yc[:, slots], mask[:, slots] = x, y, True
        found = run(file, xc=xc, yc=yc, mask=mask, xt=xt)
        with torch.no_grad():
            dist = model.predict(x, y, xt)
        for key, value in found.items():
            wanted = {"mean": "mean", "std": "stddev", "logits": "logits"}[key]
            torch.testing.assert_close(value, getattr(dist, wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_contexts_as_large_as_in_training_are_as_exact_as_float32(name: str, tmp_path: Path) -> None:
    """The files may be twice as far from torch's float64 as torch's own float32 is: logits of copy-256 reach 20."""
    model, exact, n = load_pretrained(name), load_pretrained(name).double(), LARGE[name]
    file = session(export(model, tmp_path, n=n, one=True).files["predict"])
    generator = torch.Generator().manual_seed(0)
    ours = theirs = 0.0
    for _ in range(4):
        x, y, xt = smooth(model, n, 64, generator)
        found = run(file, xc=x, yc=y, mask=torch.ones(1, n, dtype=torch.bool), xt=xt)
        with torch.no_grad():
            dist = model.predict(x, y, xt)
            wanted = exact.predict(x.double(), y.double() if y.is_floating_point() else y, xt.double())
        for key, value in found.items():
            kind = {"mean": "mean", "std": "stddev", "logits": "logits"}[key]
            ours = max(ours, difference(value, getattr(wanted, kind)))
            theirs = max(theirs, difference(getattr(dist, kind), getattr(wanted, kind)))
    assert ours <= max(1e-5, 2 * theirs)


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, relative where numbers are larger than one."""
    return float(((found.double() - wanted).abs() / wanted.abs().clamp_min(1)).max())


@pytest.mark.parametrize("log_count", [False, True])
def test_two_files_any_batch_and_any_budget(log_count: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ReTreever(dim=16, heads=2, layers=0, hidden=16, log_count=log_count).eval()
    made = export(model, tmp_path, n=4, any_budget=True, batch=None)
    assert made.about["files"]["query"]["inputs"]["xt"]["shape"] == ["b", "m", 1]
    assert json.loads((tmp_path / "export.json").read_text())["tree"]["leaves"] == 4
    encode, query = session(made.files["encode"]), session(made.files["query"])
    for b, m, budget in ((1, 1, 1), (3, 5, 3), (2, 40, 4)):
        x, xt = torch.rand(b, 4, 1), torch.rand(b, m, 1)
        mask = torch.ones(b, 4, dtype=torch.bool)
        mask[0, 3:] = False
        tree = run(encode, xc=x, yc=x.sin(), mask=mask)
        nodes = {name: tree[name] for name in ("keys", "values", "node_mask")}
        found = run(query, **nodes, xt=xt, budget=torch.tensor([budget]))
        with torch.no_grad():
            search = model.search(model.encode(x, x.sin(), mask), xt, budget=budget)
            dist = model.predict(x, x.sin(), xt, mask, budget=budget)
        torch.testing.assert_close(found["mean"], dist.mean, rtol=1e-5, atol=1e-5)
        assert (found["path"] == search.path).all()
        assert ((found["selected"] >= 0).sum(dim=2) == search.tokens_read).all()


def test_a_program_runs_where_this_package_is_not_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ReTreever(dim=16, heads=2, layers=1, hidden=16, dim_y=2).eval()
    made = export(model, tmp_path, n=5, format="pt2")
    assert not any(b"retreever/" in file.read_bytes() for file in made.files.values())  # no paths of this machine
    code = f"""
import sys
sys.modules["retreever"] = None
import torch
encode, query = (torch.export.load({str(tmp_path)!r} + "/" + name).module() for name in ("encode.pt2", "query.pt2"))
x = torch.linspace(0, 1, 5)[None, :, None]
tree = encode(x, torch.cat([x, -x], 2), torch.tensor([[True, True, True, False, False]]))
for m in (1, 4):
    print(query(tree["keys"], tree["values"], tree["node_mask"], x[:, :m])["mean"].flatten().tolist())
assert not [name for name in query.state_dict() if "encoder" in name or "aggregator" in name]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    x = torch.linspace(0, 1, 5)[None, :, None]
    for m, line in zip((1, 4), done.stdout.splitlines(), strict=True):
        with torch.no_grad():
            mean = model.predict(x[:, :3], torch.cat([x, -x], 2)[:, :3], x[:, :m]).mean
        torch.testing.assert_close(torch.tensor(json.loads(line)), mean.flatten(), rtol=1e-5, atol=1e-5)


def test_torch_export_alone_chooses_plain_torch() -> None:
    """Without `impl="reference"`: a program with operators of this package would not load without it."""
    tca = TreeCrossAttention(16, 2).eval()

    class Read(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tca = tca

        def forward(self, context: Tensor, query: Tensor) -> Tensor:
            return self.tca(query, self.tca.build(context), budget=4).output

    context, query = torch.randn(1, 6, 16), torch.randn(1, 3, 16)
    with torch.no_grad():
        program = torch.export.export(Read(), (context, query), strict=False)
        assert "retreever" not in program.graph_module.code
        torch.testing.assert_close(program.module()(context, query), Read()(context, query), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_code_gives_what_torch_gives(tmp_path: Path) -> None:
    """Both files of a tree: contexts of fewer points than slots, and every budget."""
    torch.manual_seed(0)
    model = ReTreever(dim=16, heads=2, layers=0, hidden=16).eval()
    try:
        files = export(model, tmp_path, n=6, format="aoti", any_budget=True).files
    except BackendError as error:
        if not str(error).startswith("format: aoti needs a C++ compiler"):
            raise
        pytest.skip(str(error))
    encode, query = (torch._inductor.aoti_load_package(str(files[part])) for part in ("encode", "query"))
    x, xt = torch.rand(1, 6, 1), torch.rand(1, 5, 1)
    for real in ([1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]):
        mask = torch.tensor([real]).bool()
        tree = encode(x, x.sin(), mask)
        for budget in range(1, 7):
            given = tree["keys"], tree["values"], tree["node_mask"], xt, torch.tensor([budget])
            found = query(*given)
            with torch.no_grad():
                dist = model.predict(x[:, mask[0]], x[:, mask[0]].sin(), xt, budget=budget)
            torch.testing.assert_close(found["mean"], dist.mean, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found["std"], dist.stddev, rtol=1e-5, atol=1e-5)


def test_traces_take_any_number_of_queries() -> None:
    """Of a model without a tree, in plain torch."""
    from retreever.deploy.parts import Predict

    model = TransformerCA(dim=16, heads=2, layers=1, hidden=16).eval()
    x, mask = torch.rand(1, 4, 1), torch.ones(1, 4, dtype=torch.bool)
    program = trace(Predict(model), (x, x, mask, x[:, :3]), ({}, {}, {}, {1: "m"})).module()
    for m in (1, 2, 4):
        with torch.no_grad():
            torch.testing.assert_close(program(x, x, mask, x[:, :m])["mean"], model.predict(x, x, x[:, :m]).mean)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": 0}, "n: expected an int >= 1, got 0"),
        ({"format": "tflite"}, "format: expected one of onnx, pt2, aoti, got 'tflite'"),
        ({"batch": 0}, "batch: expected an int >= 1, got 0"),
        ({"budget": 0}, "budget: expected an int >= 1, got 0"),
        ({"one": True, "explain": True}, "one: expected False with any_budget or explain, which query has, got True"),
        (
            {"model": TransformerCA, "explain": True},
            "explain: expected False for a model that builds no tree, got True",
        ),
        ({"model": TransformerCA}, "one: expected True for a model that builds no tree, got False for TransformerCA"),
        ({"dtype": torch.float64}, "model: expected weights of torch.float32, got torch.float64"),
        ({"model": NP, "one": True}, "model: expected a model that predicts without drawing samples, got NP"),
        (
            {"model": TransformerCA, "one": True, "budget": 2},
            "budget: expected None for a model that builds no tree, got 2",
        ),
        ({"out": None}, "out: expected a path, got NoneType"),
        ({"overwrite": "no"}, "overwrite: expected True or False, got 'no'"),
        ({"model": torch.nn.Linear}, "model: expected a model of this package, got Linear"),
    ],
)
def test_errors_are_one_line(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    kind = wrong.pop("model", ReTreever)
    small = {"in_features": 1, "out_features": 1} if kind is torch.nn.Linear else {"dim": 16}
    model = kind(**small).to(wrong.pop("dtype", torch.float32))
    with pytest.raises(RetreeverError, match="^" + said.replace("(", r"\(") + "$"):
        export(model, **{"out": tmp_path, "n": 4} | wrong)
    assert not list(tmp_path.iterdir())


def test_an_export_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of another kind stays beside it, and an interruption leaves the earlier one as it was."""
    export(TransformerCA(dim=16, layers=0), tmp_path, n=4, one=True, format="pt2")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model = ReTreever(dim=16, layers=0)
    with monkeypatch.context() as patch:
        patch.setattr("retreever.deploy.api.write", stop)
        with pytest.raises(KeyboardInterrupt):
            export(model, tmp_path, n=4, format="pt2", overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    export(model, tmp_path, n=4, format="pt2", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"encode.pt2", "query.pt2", "export.json"}
    (tmp_path / "export.json").unlink()  # what no export describes is not ours to delete
    export(TransformerCA(dim=16, layers=0), tmp_path, n=4, one=True, format="pt2")
    assert {file.name for file in tmp_path.iterdir()} == {"encode.pt2", "query.pt2", "predict.pt2", "export.json"}
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "query.onnx").mkdir()
    with pytest.raises(RetreeverError, match=r"^out: expected files of an earlier export, got the folder "):
        export(model, tmp_path, n=4, format="pt2", overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RetreeverError, match=r"file: cannot be written"):
        export(model, tmp_path / "file", n=4, format="pt2")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_cannot_be_traced_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Loud(torch.nn.Module):
        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            return tokens if float(tokens.abs().sum()) > 3 else 2 * tokens

    model = ReTreever(dim=16, layers=0)
    model.encoder = Loud()
    with pytest.raises(RetreeverError, match=r"^model: expected operations that torch.export can trace, got .*$"):
        export(model, tmp_path, n=4, format="pt2")
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_weights_go_by_name_and_runs_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to have the name of weights is no run, unless it has the settings of one."""
    monkeypatch.chdir(tmp_path)
    Path("gp").mkdir()
    assert not Export("gp", 4).is_run and Export("./gp/deeper", 4).is_run and Export("runs/gp-nosuch", 4).is_run
    assert not Export("a/b", 4, weights=tmp_path).is_run
    Path("gp", "config.json").write_text("{}")
    assert Export("gp", 4).is_run


def test_the_command_refuses_to_replace_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "predict.pt2").write_text("")
    words = ["export", "copy-256", "--n", "2", "--one", "--format", "pt2", "--out", str(tmp_path)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "out: expected no earlier export, got" in said and "(--overwrite replaces them)" in said
    assert main(["export", "no-such", "--n", "2", "--out", str(tmp_path)]) == 2
    assert "name: expected one of activity" in capsys.readouterr().err
