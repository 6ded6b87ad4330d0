"""Checkpoints that are whole or absent, and checked to the last byte before anything is believed.

A checkpoint is a folder: `tensors.safetensors`, `state.json` and `manifest.json` (size and SHA-256 of both, and name,
dtype and shape of every tensor). It is written under a hidden name and renamed once the disk has all of it, so what
carries its final name is complete, whenever the writer was killed. One writer per folder. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.errors import CheckpointError
from retreever.files import make_folder, open_regular, os_errors, read_bytes, sync_folder, write_synced

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
FORMAT = 1
MAX_HEADER, MAX_MANIFEST, MAX_STATE = 100_000_000, 10_000_000, 100_000_000  # bytes that are parsed as JSON
_FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"
_OTHERS = "bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in f"{_FLOATS} {_OTHERS}".split()}
_STEP = re.compile(r"step-\d{9,}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{8}}\.draft")  # half written or half deleted
_ASIDE = re.compile(rf"^\.({_NAME.pattern})\.aside\Z")  # complete, and making way for its successor


def save_checkpoint(
    folder: str | Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int = 2,
    name: str | None = None,
) -> Path:  # fmt: skip
    """Write `folder`/step-000000123, or `folder`/`name`, in one step and return its path.

    An earlier checkpoint of that name is replaced. After a numbered one, all but the `keep` newest numbered ones go,
    never the one just written. A failure raises `CheckpointError` and leaves the earlier checkpoints as they were.

    Args:
        folder: where all checkpoints of a run live; created if missing.
        step: number of the checkpoint.
        tensors: by name, on any device, of any real dtype; views and shared memory are fine.
        state: all else, of exact JSON types: dict with str keys, list, str, int, float (NaN and inf too), bool, None.
        keep: how many numbered checkpoints to keep.
        name: a name in place of the step, such as "best".
    """
    check_int("step", step, 0)
    check_int("keep", keep, 1)
    if name is not None and (not _NAME.fullmatch(name) or _STEP.fullmatch(name)):
        reject("name", "letters, digits, - and _, not like a step", repr(name))
    target = Path(folder) / (name or f"step-{step:09d}")
    contents = _encode(target, tensors, state)
    with os_errors(target, "checkpoint cannot be written", CheckpointError):
        make_folder(target.parent)
        _tidy(target.parent)
        try:
            _write(target, contents)
            if name is None:
                _prune(target.parent, keep, target)
        finally:
            _tidy(target.parent)
    return target


def tidy_checkpoints(folder: str | Path, keep: int = 2) -> None:
    """Finish what a killed writer left: half-written checkpoints go, and all but the `keep` newest numbered ones."""
    path = Path(folder)
    if path.exists():
        with os_errors(path, "cannot be written", CheckpointError):
            _prune(path, keep)
            _tidy(path)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The complete numbered checkpoint with the highest step; None where there is none."""
    with os_errors(folder, "cannot be read", CheckpointError):
        return next(reversed(_numbered(Path(folder))), None)


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of a checkpoint, in the order they were saved; the first thing amiss is a `CheckpointError`."""
    folder = _place(path)
    files, wanted = _read_manifest(folder / MANIFEST)
    state = _parse(folder / STATE, _verified(folder / STATE, *files[STATE]))
    if not isinstance(state, dict):
        refuse(folder / STATE, "a JSON object", type(state).__name__)
    tensors = _decode(folder / TENSORS, _verified(folder / TENSORS, *files[TENSORS]))
    check_fits(folder / TENSORS, tensors, wanted)
    return {key: tensors[key].to(device) for key in wanted}, state


def describe_checkpoint(path: str | Path) -> dict[str, str]:
    """Dtype and shape of every tensor, as the manifest has them: what a model must fit before anything is loaded."""
    return _read_manifest(_place(path) / MANIFEST)[1]


def check_fits(path: str | Path, found: Mapping[str, Tensor | str], wanted: Mapping[str, Tensor | str]) -> None:
    """Names, dtypes and shapes of the tensors `found` in `path` must be those `wanted`; either may be descriptions."""
    ours, theirs = ({key: _describe(value) for key, value in tensors.items()} for tensors in (wanted, found))
    wrong = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    if wrong:
        key, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        refuse(f"{path}: {key}", ours.get(key, "no such tensor"), theirs.get(key, "no such tensor") + more)


def refuse(where: object, expected: object, got: object) -> NoReturn:
    """Raise the one-line `CheckpointError`: file and entry, what was expected, what it holds."""
    raise CheckpointError(" ".join(f"{where}: expected {expected}, got {got}".splitlines()))


def _describe(tensor: Tensor | str) -> str:
    if isinstance(tensor, str):
        return tensor
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _place(path: str | Path) -> Path:
    """Where the checkpoint lies: aside, if its writer was killed while the successor took its place."""
    folder = Path(path)
    with os_errors(folder, "cannot be read", CheckpointError):
        return _aside(folder) if not folder.exists() and _aside(folder).exists() else folder


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.aside")


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.draft")


def _numbered(folder: Path) -> list[Path]:
    """Complete numbered checkpoints by rising step, also one that a killed writer left aside."""
    names = {_ASIDE.sub(r"\1", entry.name) for entry in folder.iterdir()} if folder.exists() else set()
    found = [folder / name for name in names if _STEP.fullmatch(name)]
    whole = [path for path in found if (path / MANIFEST).exists() or (_aside(path) / MANIFEST).exists()]
    return sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))


def _write(target: Path, contents: dict[str, bytes]) -> None:
    draft = _draft(target)
    draft.mkdir()
    for name, data in contents.items():
        write_synced(draft / name, data)
    sync_folder(draft)
    if target.exists():
        os.replace(target, _aside(target))  # killed here: loading finds it aside, saving puts it back
    os.replace(draft, target)
    sync_folder(target.parent)


def _prune(folder: Path, keep: int, written: Path | None = None) -> None:
    """Rename all but the `keep` newest numbered checkpoints and the one just `written`; `_tidy` deletes them."""
    for old in _numbered(folder)[:-keep]:
        if old != written:
            os.replace(old, _draft(old))  # gone in one step


def _tidy(folder: Path) -> None:
    """Delete what nobody needs; a checkpoint left aside without a successor gets its name back."""
    for entry in list(folder.iterdir()):
        if aside := _ASIDE.fullmatch(entry.name):
            target = folder / aside[1]
            entry = entry.replace(_draft(target) if target.exists() else target)
        if _DRAFT.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)  # what stays goes next time


def _encode(target: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> dict[str, bytes]:
    """All files of a checkpoint by name, the manifest last."""
    if type(state) is not dict:
        refuse(f"{target}: state", "a dict", type(state))
    try:
        _check_json(f"{target}: state", state)
        contents = {STATE: json.dumps(state, ensure_ascii=False).encode(), TENSORS: _pack(target, tensors)}
    except (ValueError, RecursionError) as error:  # half a surrogate pair, an endless int, a list inside itself
        refuse(target, "names and state that JSON can hold", error)
    manifest = {
        "format": FORMAT,
        "files": {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in contents.items()},
        "tensors": {key: {"dtype": DTYPES[value.dtype], "shape": list(value.shape)} for key, value in tensors.items()},
    }
    contents[MANIFEST] = json.dumps(manifest, indent=1).encode()
    if len(contents[MANIFEST]) > MAX_MANIFEST:
        refuse(target, f"tensors that a manifest of {MAX_MANIFEST} bytes can name", len(tensors))
    return contents


def _check_json(where: str, value: object) -> None:
    """Only types that JSON gives back unchanged; subclasses such as numpy.float64 and enums are not among them."""
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                refuse(where, "keys of type str", repr(key))
            _check_json(f"{where}.{key}", inner)
    elif type(value) is list:
        for index, inner in enumerate(value):
            _check_json(f"{where}[{index}]", inner)
    elif value is not None and type(value) not in (str, int, float, bool):
        refuse(where, "dict, list, str, int, float, bool or None", type(value))


def _pack(target: Path, tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file. Copies are made where needed: the format demands dense tensors that share no memory."""
    packed: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        if not isinstance(key, str) or key == "__metadata__":
            refuse(f"{target}: tensors", "names of type str", repr(key))
        if not isinstance(tensor, Tensor):
            refuse(f"{target}: {key}", "a tensor", type(tensor))
        if tensor.is_meta or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            refuse(f"{target}: {key}", "dense real numbers", f"{_describe(tensor)} {tensor.layout} on {tensor.device}")
        dense = tensor.detach().to("cpu").resolve_neg().contiguous()
        memory = dense.untyped_storage().data_ptr()
        packed[key] = dense.clone() if memory in seen else dense
        seen.add(memory)
    return safetensors.torch.save(packed)


def _read_manifest(file: Path) -> tuple[dict[str, tuple[int, str]], dict[str, str]]:
    """Size and SHA-256 of both files, description of every tensor."""
    manifest = _parse(file, read_bytes(file, MAX_MANIFEST, CheckpointError))
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        refuse(f"{file}: format", f"version {FORMAT}", version)
    try:
        entries = {name: manifest["files"][name] for name in (TENSORS, STATE)}
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()}
        tensors = {key: f"{entry['dtype']} {tuple(entry['shape'])}" for key, entry in manifest["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        refuse(file, "size and sha256 of both files, dtype and shape of all tensors", f"{type(error).__name__} {error}")
    if files[STATE][0] > MAX_STATE:
        refuse(f"{file}: {STATE}: size", f"at most {MAX_STATE}", files[STATE][0])
    return files, tensors


def _parse(file: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        refuse(file, "JSON", error)


def _verified(file: Path, size: int, digest: str) -> bytes:
    """The bytes that are checked are the bytes that are used: read once, and only if there are as many as promised."""
    with open_regular(file, 2**62, CheckpointError) as stream, os_errors(file, "cannot be read", CheckpointError):
        if (found_size := os.fstat(stream.fileno()).st_size) != size:
            refuse(file, f"{size} bytes", found_size)
        data = stream.read(size)
    if (found := sha256(data).hexdigest()) != digest:
        refuse(file, f"sha256 {digest}", found)
    return data


def _decode(file: Path, data: bytes) -> dict[str, Tensor]:
    if (header := int.from_bytes(data[:8], "little")) > (limit := min(MAX_HEADER, len(data) - 8)):
        refuse(file, f"a header of at most {limit} bytes", header)
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ArithmeticError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        refuse(file, "a safetensors file", f"{type(error).__name__} {error}")
