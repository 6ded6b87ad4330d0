"""`save_model` and `load_model`: one file that holds all a model is, and refuses what it is not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from retreever import (
    BANP,
    CMANP,
    GRUD,
    CheckpointError,
    ConfigError,
    InputError,
    PerceiverIO,
    RandomGuess,
    ReTreever,
    Scaled,
    Scaler,
    TransformerCA,
    load_model,
    save_model,
)

SIZES: dict[str, Any] = {"dim": 16, "layers": 1, "hidden": 16}
MODELS = [
    ReTreever(**SIZES, heads=2, waves=4, branch=4, mean_levels=1, budget=7),
    ReTreever(**SIZES).double(),
    TransformerCA(**SIZES, head="point"),
    PerceiverIO(**SIZES, latents=3),
    BANP(dim=16),
    CMANP(**SIZES, latents=4),
    Scaled(ReTreever(**SIZES, dim_x=2), Scaler(2, 1)),
    GRUD(dim_y=8, outputs=3, head="categorical"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_comes_back_as_it_was(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(0.1)
    state = torch.get_rng_state()
    found = load_model(save_model(model, tmp_path / "mine.safetensors"))
    ours, theirs = (getattr(one, "model", one) for one in (found, model))
    assert type(found) is type(model) and ours.config == theirs.config and not found.training
    torch.testing.assert_close(dict(found.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    file = save_model(MODELS[0], tmp_path / "mine.safetensors")
    with pytest.raises(InputError, match=r"^file: expected a new file, or overwrite=True"):
        save_model(MODELS[2], file)
    assert isinstance(load_model(file), ReTreever)
    assert isinstance(load_model(save_model(MODELS[2], file, overwrite=True)), TransformerCA)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "model: expected a model of this library, or a Scaled one, got Linear"),
        (RandomGuess(), "model: expected a model of this library, or a Scaled one, got RandomGuess"),
        (ReTreever(**SIZES, aggregator=nn.Identity()), "model: expected parts that its settings describe, got others"),
    ],
)
def test_what_cannot_be_built_again_is_not_saved(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        save_model(model, tmp_path / "mine.safetensors")
    assert not list(tmp_path.iterdir())


def changed(settings: Any, drop: str = "nothing") -> bytes:
    tensors = {name: value for name, value in MODELS[2].state_dict().items() if name != drop}
    return safetensors.torch.save(
        tensors, {"retreever": settings if isinstance(settings, str) else json.dumps(settings)}
    )


GOOD = {"kind": "TransformerCA", **SIZES}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a file of save_model"),
        (b"pickle", "expected a file of save_model"),
        (safetensors.torch.save({"a": torch.ones(1)}), "got one without weights, or without settings"),
        (safetensors.torch.save({}, {"retreever": json.dumps({"model": GOOD})}), "got one without weights"),
        (changed("{"), "expected a file of save_model"),
        (changed([1]), "got one without weights, or without settings"),
        (changed({"model": {"kind": "Other"}}), "expected settings of a model, got kind: expected one of"),
        (changed({"model": GOOD | {"dim": 15}}), "expected settings of a model, got heads"),
        (changed({"model": GOOD | {"dim": 32}}), r"expected float32 \(\d+"),
        (changed({"model": GOOD | {"layers": 10**9}}), "expected the tensors of 1000000000 layers"),
        (changed({"model": GOOD, "scaled": True}), "expected settings of a model, got 'scaler.x_mean'"),
        (changed({"model": GOOD | {"head": "point"}}, "head.net.0.bias"), "got no such tensor"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors: expected a file of save_model, got No such file"):
        load_model(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("call", [load_model, partial(save_model, MODELS[0])])
def test_a_file_is_named_by_a_path(call: Any) -> None:
    with pytest.raises(InputError, match=r"^file: expected a path, got int$"):
        call(3)
