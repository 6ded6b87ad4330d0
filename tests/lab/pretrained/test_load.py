"""Weights that are loaded are those that were exported, to the last byte, or a clear error."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retreever import CheckpointError, InputError, ReTreever, RetreeverError, load_pretrained
from retreever.lab.pretrained.probe import probe
from retreever.lab.recipes.command import load_run
from retreever.pretrained.card import MAX_BYTES, read_card


def rewrite(folder: Path, **changes: Any) -> None:
    """Change entries of the card; None takes one away."""
    file = folder / "tiny.json"
    card = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in card.items() if value is not None}))


def with_weights(folder: Path, data: bytes) -> None:
    """Other weights, and a card that vouches for them."""
    (folder / "tiny.safetensors").write_bytes(data)
    rewrite(folder, size=len(data), sha256=sha256(data).hexdigest())


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_pretrained("tiny", folder)
    assert "\n" not in str(caught.value)


def test_the_model_is_the_one_that_was_trained(trained: Path, exported: Path) -> None:
    model = load_pretrained("tiny", exported)
    assert isinstance(model, ReTreever) and not model.training
    _, original, _ = load_run(trained)
    ours, theirs = model.state_dict(), original.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert probe(model) == pytest.approx(read_card("tiny", exported).probe, abs=1e-8)


def test_kernels_may_be_chosen(exported: Path) -> None:
    """Those of the card otherwise."""
    assert load_pretrained("tiny", exported).config.impl == "auto"
    assert load_pretrained("tiny", exported, impl="reference").config.impl == "reference"
    with pytest.raises(InputError, match=r"^impl: expected"):
        load_pretrained("tiny", exported, impl="fast")  # type: ignore[arg-type]


def test_loading_leaves_random_numbers_and_default_dtype_alone(exported: Path) -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        model = load_pretrained("tiny", str(exported))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["gpt", "", "../tiny", "tiny.json", "../../etc/passwd", None, 3])
def test_unknown_names_list_those_there_are(name: Any, exported: Path) -> None:
    with pytest.raises(InputError, match=r"name: expected one of tiny in .*, got"):
        load_pretrained(name, exported)


def test_an_empty_or_absent_folder_has_no_names(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="folder: expected one with weights"):
            load_pretrained("gp", place)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**9), change=st.integers(1, 255))
def test_a_changed_byte_is_noticed(folder: Path, exported: Path, place: int, change: int) -> None:
    data = bytearray((exported / "tiny.safetensors").read_bytes())
    data[place % len(data)] ^= change
    (folder / "tiny.safetensors").write_bytes(data)
    refused(folder, r"tiny\.safetensors: sha256: expected [0-9a-f]{64}, got [0-9a-f]{64}")


def test_missing_short_and_long_files_are_refused(folder: Path) -> None:
    file = folder / "tiny.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    refused(folder, rf"tiny\.safetensors: size: expected {len(data)} bytes, got {len(data) - 1}")
    file.write_bytes(bytes(MAX_BYTES + 1))
    refused(folder, rf"tiny\.safetensors: expected at most {MAX_BYTES:,} bytes, got {MAX_BYTES + 1:,}")
    file.unlink()
    refused(folder, r"tiny\.safetensors: cannot be read: No such file")


@pytest.mark.parametrize("name", ["tiny.json", "tiny.safetensors"])
def test_a_pipe_in_place_of_a_file_does_not_hang(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, rf"{name}: cannot be read: expected a regular file, got a pipe")


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"not a tensor in sight"])
def test_what_is_not_safetensors_is_refused(folder: Path, data: bytes) -> None:
    with_weights(folder, data)
    refused(folder, r"tiny\.safetensors: expected a safetensors file")


def test_tensors_that_do_not_fit_are_named(folder: Path, exported: Path) -> None:
    tensors = safetensors.torch.load_file(exported / "tiny.safetensors")
    key = sorted(tensors)[0]
    other = {"shape": tensors[key][..., None].clone(), "dtype": tensors[key].double()}
    for value in other.values():
        with_weights(folder, safetensors.torch.save(tensors | {key: value}))
        refused(folder, rf"tiny\.safetensors: {key}: expected float32")
    with_weights(folder, safetensors.torch.save({k: v for k, v in tensors.items() if k != key}))
    refused(folder, rf"{key}: expected float32 .*, got no such tensor")
    with_weights(folder, safetensors.torch.save(tensors | {"stranger": torch.zeros(1)}))
    refused(folder, "stranger: expected no such tensor, got float32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 1}, "format: expected 2, got 1"),
        ({"sha256": None}, "sha256: expected str, got none"),
        ({"size": "many"}, "size: expected int, got str"),
        ({"steps": True}, "steps: expected int, got bool"),
        ({"colour": "red"}, "colour: expected no such entry, got one"),
        ({"name": "other"}, "name: expected 'tiny', got 'other'"),
        ({"scores": {}}, "scores: expected one or more, got none"),
        ({"scores": {"test": float("nan")}}, r"scores\.test: expected a finite number, got nan"),
        ({"scores": {"test": "good"}}, r"scores\.test: expected a finite number, got 'good'"),
        ({"scores": {"test": 10**400}}, r"scores\.test: expected a finite number, got 1000"),
        ({"settings": {}}, r"settings\.task: expected an entry, got none"),
        ({"model": {}}, "model: kind: expected one of ReTreever, .*, MTANDEnc, got None"),
        ({"model": {"kind": []}}, r"model: kind: expected one of ReTreever, .*, MTANDEnc, got \[\]"),
        ({"model": {"kind": "ReTreever", "colour": 1}}, "model: colour: expected a setting of ReTreever, got another"),
        ({"model": {"kind": "ReTreever", "dim": "wide"}}, "model: dim: expected an int >= 1, got str 'wide'"),
        ({"model": {"kind": "ReTreever", "objective": 3}}, "model: objective: expected settings of the objective"),
    ],
)
def test_a_damaged_card_is_refused(folder: Path, changes: dict[str, Any], match: str) -> None:
    rewrite(folder, **changes)
    refused(folder, rf"tiny\.json: {match}")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000])
def test_a_card_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "tiny.json").write_text(text)
    refused(folder, r"tiny\.json: expected (a )?JSON")


VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4) | st.lists(st.integers())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_card_says_either_it_loads_or_it_is_refused(
    folder: Path, exported: Path, data: st.DataObject
) -> None:
    card = json.loads((exported / "tiny.json").read_text())
    place = data.draw(st.sampled_from([card, card["model"], card["settings"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    (folder / "tiny.json").write_text(json.dumps(card))
    try:
        assert isinstance(load_pretrained("tiny", folder), ReTreever)
    except RetreeverError as error:
        assert "tiny" in str(error) and "\n" not in str(error)


BOMBS = [{"dim": 12_000}, {"layers": 10**6}, {"hidden": 10**7}, {"dim": 10**12}, {"layers": 10**400}]


@pytest.mark.parametrize("change", BOMBS, ids=lambda change: next(iter(change)))
def test_a_card_that_claims_a_huge_model_costs_nothing(change: dict[str, int], folder: Path) -> None:
    """Compared with the tensors in the file before the model is built."""
    card = read_card("tiny", folder)
    rewrite(folder, model=card.model | change)
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(folder, r"tiny\.(json|safetensors): ")
    assert time.perf_counter() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("change", BOMBS, ids=lambda change: next(iter(change)))
def test_a_run_that_claims_a_huge_model_costs_nothing(change: dict[str, int], trained: Path, tmp_path: Path) -> None:
    run = tmp_path / trained.name
    shutil.copytree(trained, run)
    config = json.loads((run / "config.json").read_text()) | change
    (run / "config.json").write_text(json.dumps(config))
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RetreeverError, match=r"^[^\n]+$"):
        load_run(run)
    assert time.perf_counter() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
