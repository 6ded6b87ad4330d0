"""Checkpoints give back every bit, and are refused by name when anything is amiss."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever import CheckpointError
from retreever.train import checkpoint
from retreever.train.checkpoint import DTYPES, check_fits, load_checkpoint, save_checkpoint

FILES = ("tensors.safetensors", "state.json", "manifest.json")
TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return save_checkpoint(tmp_path, 1, TENSORS, {"step": 1})


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit pattern at all, NaN with payloads included."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def refused(path: Path, file: str, *parts: str) -> None:
    """Loading fails within a second with one line that names the file and holds the parts."""
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path / file}: ") and len(message.splitlines()) == 1
    assert all(part in message for part in parts), message
    assert time.perf_counter() - start < 1


def sign(path: Path, file: str, data: bytes) -> None:
    """Change a file and the manifest with it, as an attacker would."""
    (path / file).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(path, lambda manifest: manifest["files"].update({file: entry}))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((path / FILES[2]).read_bytes())
    change(manifest)
    (path / FILES[2]).write_text(json.dumps(manifest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_the_bit_and_in_order(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = {"z": (3, 5), "scalar": (), "empty": (0, 4), "a": (1,)}
    tensors = {key: random_bits(dtype, *shape) for key, shape in shapes.items()}
    loaded, state = load_checkpoint(save_checkpoint(tmp_path / "new" / "folder", 3, tensors, {}))
    assert list(loaded) == list(shapes) and state == {}
    check_fits("here", loaded, tensors)
    assert all(bits(loaded[key]) == bits(tensors[key]) for key in tensors)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_parameters_and_shared_memory_are_saved_by_value(device: str, tmp_path: Path) -> None:
    base = torch.arange(12.0, device=device).reshape(3, 4)
    tied = torch.nn.Parameter(torch.randn(2, 2, device=device))
    negative = torch.randn(1, dtype=torch.complex64, device=device).conj().imag  # its memory holds the opposite sign
    tensors = {
        "base": base, "same": base, "turned": base.t(), "row": base[1], "strided": base[:, ::2],
        "wide": base[:1].expand(5, 4), "tied": tied, "tied too": tied, "negative": negative,
    }  # fmt: skip
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, 0, tensors, {}), device)
    assert negative.is_neg() and all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    loaded["base"].zero_()
    assert torch.equal(loaded["same"], base) and not loaded["tied"].requires_grad


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_state_comes_back_exactly(state: dict[str, Any]) -> None:
    """By representation: types, order, -0.0 and NaN count."""
    with tempfile.TemporaryDirectory() as folder:
        assert repr(load_checkpoint(save_checkpoint(folder, 0, {}, state))[1]) == repr(state)


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, {"b": (1,)}]}, "a[1].b: expected dict, list, str, int, float, bool or None, got <class 'tuple'>"),
        ({"best": np.float64(1)}, "state.best: expected"),
        ({"t": torch.tensor(1)}, "got <class 'torch.Tensor'>"),
        ({"a": {1: 2}}, "state.a: expected keys of type str, got 1"),
        ([1], "state: expected a dict, got <class 'list'>"),
        ({"a": endless}, "recursion"),
        ({"a": "\ud83d"}, "surrogates"),
        ({"a": 10**5000}, "digits"),
    ],
)
def test_state_that_json_would_change_is_refused_unwritten(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^.*step-000000001: .*{re.escape(message)}[^\n]*$"):
        save_checkpoint(tmp_path / "new", 1, TENSORS, state)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("w", [1.0], "w: expected a tensor, got <class 'list'>"),
        ("w", torch.zeros(2, dtype=torch.complex64), "w: expected dense real numbers, got complex64 (2,)"),
        ("w", torch.eye(2).to_sparse(), "torch.sparse_coo"),
        ("w", torch.zeros(2, device="meta"), "on meta"),
        (1, torch.zeros(2), "tensors: expected names of type str, got 1"),
        ("__metadata__", torch.zeros(2), "got '__metadata__'"),
        ("\ud83d", torch.zeros(2), "surrogates"),
    ],
)
def test_tensors_that_a_file_cannot_hold_are_refused(key: Any, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        save_checkpoint(tmp_path / "new", 1, {key: value}, {})
    assert not (tmp_path / "new").exists()


def test_more_tensors_than_loading_would_accept_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST", 500)
    with pytest.raises(CheckpointError, match=r"500 bytes can name, got 20$"):
        save_checkpoint(tmp_path, 1, {str(key): torch.zeros(1) for key in range(20)}, {})


@pytest.mark.parametrize("file", FILES)
def test_a_missing_or_short_file_is_named(file: str, path: Path) -> None:
    data = (path / file).read_bytes()
    for size in (len(data) - 1, 3, 0):
        (path / file).write_bytes(data[:size])
        refused(path, file, "expected JSON" if file == FILES[2] else f"expected {len(data)} bytes, got {size}")
    (path / file).unlink()
    refused(path, file, "cannot be read: No such file or directory")


@pytest.mark.parametrize("file", FILES[:2])
def test_a_flipped_or_added_byte_is_named(file: str, path: Path) -> None:
    data = (path / file).read_bytes()
    (path / file).write_bytes(data + b" ")
    refused(path, file, f"got {len(data) + 1}")
    for place in (0, len(data) // 2, len(data) - 1):
        (path / file).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused(path, file, "expected sha256")


def test_no_flipped_byte_of_the_manifest_changes_what_is_loaded(path: Path) -> None:
    data, refusals = (path / FILES[2]).read_bytes(), 0
    for place in range(len(data)):
        (path / FILES[2]).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            tensors, state = load_checkpoint(path)
        except CheckpointError:
            refusals += 1
        else:  # between the words
            assert state == {"step": 1} and all(torch.equal(tensors[key], TENSORS[key]) for key in TENSORS)
    assert refusals > len(data) / 2


def test_a_header_longer_than_the_file_or_the_limit_is_not_parsed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (path / FILES[0]).read_bytes()
    for length in (len(data) - 7, 2**40, 2**64 - 1):
        sign(path, FILES[0], length.to_bytes(8, "little") + data[8:])
        refused(path, FILES[0], f"expected a header of at most {len(data) - 8} bytes, got {length}")
    sign(path, FILES[0], data)
    monkeypatch.setattr(checkpoint, "MAX_HEADER", 20)
    refused(path, FILES[0], "expected a header of at most 20 bytes")
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST", 20)
    refused(path, FILES[2], "expected at most 20 bytes")


def entry(dtype: str, shape: list[int], end: int) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}})


@pytest.mark.parametrize(
    "header",
    [
        *("", "{", "[]", '{"w": {}}', entry("F32", [2], 4), entry("F32", [9, 9], 324), entry("F32", [2**62, 4], 4)),
        *(entry("F8_E8M0", [4], 4), entry("X", [4], 4), entry("F32", [-1], 4), entry("F32", [1], 3)),
    ],
)
def test_nonsense_with_a_valid_signature_is_refused(header: str, path: Path) -> None:
    sign(path, FILES[0], len(header).to_bytes(8, "little") + header.encode() + b"\x00" * 4)
    refused(path, FILES[0], "expected a safetensors file")


@pytest.mark.parametrize(
    ("data", "part"), [(b"{", "JSON"), (b"\xff\xfe", "JSON"), (b"[" * 10**5, "JSON"), (b"[1]", "got list")]
)
def test_state_that_is_no_json_object_is_refused(data: bytes, part: str, path: Path) -> None:
    sign(path, FILES[1], data)
    refused(path, FILES[1], "expected", part)


@pytest.mark.parametrize(
    ("manifest", "part"),
    [
        ("[]", "format: expected version 1, got None"),
        ('{"format": 2}', "format: expected version 1, got 2"),
        ('{"format": 1}', "'files'"),
        ('{"format": 1, "files": {"tensors.safetensors": {}}}', "'state.json'"),
        ('{"format": 1, "files": 3}', "TypeError"),
    ],
)
def test_a_manifest_of_another_version_or_kind_is_refused(manifest: str, part: str, path: Path) -> None:
    for entry in (None, 1, {"dtype": "float32"}, {"dtype": "float32", "shape": 3}):
        edit(path, lambda manifest, entry=entry: manifest["tensors"].update(w=entry))
        refused(path, FILES[2], "dtype and shape of all tensors")
    (path / FILES[2]).write_text(manifest)
    refused(path, FILES[2], part)


@pytest.mark.parametrize("field", ["size", "sha256"])
@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1e400])
def test_no_entry_of_the_manifest_switches_a_check_off(field: str, value: object, path: Path) -> None:
    edit(path, lambda manifest: manifest["files"][FILES[1]].update({field: value}))
    with pytest.raises(CheckpointError, match=r"manifest\.json|state\.json"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("w"), "w: expected no such tensor, got float32 (2, 3)"),
        (lambda t: t.update(x=t["n"]), "x: expected int64 (), got no such tensor"),
        (lambda t: t["w"].update(shape=[3, 2]), "w: expected float32 (3, 2), got float32 (2, 3)"),
        (lambda t: t["w"].update(dtype="int32"), "w: expected int32 (2, 3), got float32 (2, 3)"),
        (lambda t: [t["w"].update(shape=[]), t.pop("n")], "w: expected float32 (), got float32 (2, 3) (and 1 more)"),
    ],
)
def test_tensors_must_be_those_of_the_manifest(change: Callable[[Any], object], message: str, path: Path) -> None:
    edit(path, lambda manifest: change(manifest["tensors"]))
    refused(path, FILES[0], message)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"w": torch.zeros(2, 3)}, "n: expected no such tensor, got int64 ()"),
        (TENSORS | {"b": torch.zeros(1)}, "b: expected float32 (1,), got no such tensor"),
        (TENSORS | {"w": torch.zeros(6)}, "w: expected float32 (6,), got float32 (2, 3)"),
        (TENSORS | {"n": torch.tensor(7.0)}, "n: expected float32 (), got int64 ()"),
    ],
)
def test_tensors_must_fit_the_model(wanted: dict[str, Tensor], message: str) -> None:
    check_fits("run/best", TENSORS, TENSORS)
    with pytest.raises(CheckpointError) as caught:
        check_fits(Path("run/best"), TENSORS, wanted)
    assert str(caught.value) == f"run/best: {message}"


def test_loading_needs_no_more_than_twice_the_memory_of_the_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {str(part): torch.zeros(1 << 20) for part in range(8)}, {})
    size = (path / FILES[0]).stat().st_size
    tracemalloc.start()
    try:
        load_checkpoint(path)
        assert size < tracemalloc.get_traced_memory()[1] < 2.1 * size
        with open(path / FILES[0], "r+b") as stream:
            stream.truncate(size - 1)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        refused(path, FILES[0], f"expected {size} bytes")
        assert tracemalloc.get_traced_memory()[1] - before < size / 10
    finally:
        tracemalloc.stop()
