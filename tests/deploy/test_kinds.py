"""Files of models that read raw tokens, and of models of irregular series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever import PerceiverIO, ReTreever, TransformerCA, export
from retreever.deploy.formats import trace, write
from retreever.errors import RetreeverError
from retreever.models.base import Model
from retreever.models.series.kinds import SERIES
from retreever.models.series.latent_ode import LatentODE
from retreever.models.series.observed import context_of

TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
RAW = {"inputs": "tokens", "dim_y": 5, "dim_x": 6, "outputs": 4, "head": "categorical"}
REAL = torch.tensor([True, True, False, True, True, True, False])
N = len(REAL)


def answers(file: Path, *inputs: Tensor) -> dict[str, Tensor]:
    """What a file gives; inputs are in its own order."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(*inputs)
    runtime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install 'retreever[export]'")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(file), options)
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    return {value.name: torch.from_numpy(part) for value, part in zip(session.get_outputs(), found, strict=True)}


def tokens_and_queries(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(1, N, 5, generator=generator), torch.randn(1, m, 6, generator=generator)


@pytest.mark.parametrize("kind", [PerceiverIO, TransformerCA])
def test_raw_tokens_and_queries(kind: type[Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(**TINY | RAW).eval()
    made = export(model, tmp_path, n=N, one=True, format="pt2")
    assert list(made.about["files"]["predict"]["inputs"]) == ["tokens", "mask", "xt"]
    for m in (1, 4):
        tokens, xt = tokens_and_queries(m)
        found = answers(made.files["predict"], tokens, REAL[None], xt)
        with torch.no_grad():
            torch.testing.assert_close(found["logits"], model(tokens[:, REAL], xt), rtol=1e-5, atol=1e-5)


def test_raw_tokens_in_two_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ReTreever(**TINY | RAW | {"layers": 0}).eval()
    files, real = export(model, tmp_path, n=4).files, REAL[:4]
    for m in (1, 4):
        tokens, xt = tokens_and_queries(m)
        tree = answers(files["encode"], tokens[:, :4], real[None])
        found = answers(files["query"], *(tree[name] for name in ("keys", "values", "node_mask")), xt)
        with torch.no_grad():
            wanted = model(tokens[:, :4][:, real], xt)
        torch.testing.assert_close(found["logits"], wanted, rtol=1e-5, atol=1e-5)


def series_model(name: str) -> Model:
    """A small model with random weights; as made, some read a part of their inputs alone."""
    torch.manual_seed(0)
    narrow = {"units": 8, "gru_units": 8} if "ode" in name else {}
    model = SERIES[name](dim_y=6, hidden=8, **narrow).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def check_series(name: str, form: Any, folder: Path) -> None:
    """Times twice the same, a channel seen once alone, slots without a point; asked before, between, at and after."""
    model = series_model(name)
    file = export(model, folder, n=N, one=True, format=form).files["predict"]
    times = torch.rand(1, N).sort().values
    times[0, 4] = times[0, 3]
    observed = torch.rand(1, N, 3) < 0.6
    observed[:, 0], observed[:, 1:, 2] = True, False
    xc, yc = context_of(times, torch.rand(1, N, 3), observed)
    for xt in (torch.rand(1, 1, 1), xc[:, REAL], torch.tensor([[[-1.0], [0.5], [2.0]]])):
        found = answers(file, xc, yc, REAL[None], xt)
        with torch.no_grad():
            dist = model.predict(xc[:, REAL], yc[:, REAL], xt)
        torch.testing.assert_close(found["mean"], dist.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["std"], dist.stddev, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "form"), [("seft", "pt2"), ("rnn-decay", "pt2"), ("grud", "onnx")])
def test_series(name: str, form: Any, tmp_path: Path) -> None:
    check_series(name, form, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize("name", SERIES)
def test_every_model_of_series(name: str, form: Any, tmp_path: Path) -> None:
    check_series(name, form, tmp_path)


def test_an_adaptive_solver_is_refused_in_one_line(tmp_path: Path) -> None:
    model = LatentODE(solver="adaptive")
    with pytest.raises(RetreeverError, match=r"^model: expected one with solver='fixed'.*, got 'adaptive'$"):
        export(model, tmp_path, n=4, one=True)
    assert not list(tmp_path.iterdir())


class Searching(torch.nn.Module):
    def forward(self, x: Tensor, asked: Tensor) -> dict[str, Tensor]:
        values, places = x.cummax(dim=1)
        sorted_ = values.transpose(1, 2).contiguous()
        after, before = (torch.searchsorted(sorted_, asked, right=right) for right in (True, False))
        return {"values": values, "places": places, "after": after, "before": before}


def test_an_operation_that_onnx_has_not_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'retreever[export]'")
    monkeypatch.setattr("retreever.deploy.onnx_sort.translations", dict)
    program = trace(Searching(), (torch.rand(2, 9, 3), torch.rand(2, 3, 6)), ({}, {}))
    with pytest.raises(RetreeverError, match=r"^format: torch \S+ has no ONNX for aten.cummax; take pt2$"):
        write(program, tmp_path / "file.onnx", "onnx", ("values", "places", "after", "before"))


def test_running_maxima_and_searches_among_equals(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'retreever[export]'")
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(4, (2, 9, 3), generator=generator).float()
    asked = torch.randint(-1, 5, (2, 3, 6), generator=generator).float()
    wanted = Searching()(x, asked)
    write(trace(Searching(), (x, asked), ({}, {})), tmp_path / "file.onnx", "onnx", tuple(wanted))
    found = answers(tmp_path / "file.onnx", x, asked)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
