"""Trees on disk: one safetensors file, written atomically and checked before it is believed.

The header has the shape of the tree and the fingerprint of the weights that made it; the last tensor, `seal`, has the
SHA-256 of the header and of all data before it. The key and the value of a node lie side by side, so that a search of a
mapped tree touches few pages. Any reader of safetensors can read the file.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from retreever.arguments import reject
from retreever.errors import CheckpointError
from retreever.files import open_regular, os_errors, write_chunks
from retreever.tree.plan import TreePlan
from retreever.tree.stamp import Stamp
from retreever.tree.value import Tree

FORMAT, VERSION = "retreever.tree", "1"
PAGE, PIECE = 4096, 1 << 22  # bytes: where the data begin, and what is read or written at a time
MAX_HEADER = 1_000_000
SEAL = "seal"
NAMES = ("nodes", "mask", "pairs", "log_count", "counted", "order", "count", "length")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8",
}  # fmt: skip
KINDS = {name: dtype for dtype, name in DTYPES.items()}
Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]  # one tensor, or several of the same shape that are stacked behind their second axis
Entry = tuple[torch.dtype, Shape, int, int]  # of a tensor: dtype, shape, first byte and end within the data


def save_tree(tree: Tree, path: str | Path) -> Path:
    """Write `tree` and the tree beside it to a file; an earlier one is replaced in one step, or stays as it is."""
    trees = {"": tree} if tree.beside is None else {"": tree, "beside.": tree.beside}
    named = [(prefix + name, parts) for prefix, part in trees.items() for name, parts in _tensors(part).items()]
    tensors = dict(sorted(named, key=lambda item: -item[1][0].element_size()))  # so that all numbers are aligned
    header = _header(tensors, {prefix: _shape_of(part) for prefix, part in trees.items()}, tree.stamp)

    def chunks() -> Iterator[bytes]:
        digest = sha256()
        yield header
        for parts in tensors.values():
            for piece in _pieces(parts):
                digest.update(piece)
                yield piece
        yield sha256(header).digest() + digest.digest()

    return write_chunks(path, chunks(), CheckpointError)


def load_tree(path: str | Path, mapped: bool, verify: bool) -> Tree:
    """The tree in a file, mapped into memory or read."""
    file = Path(path)
    with open_regular(file, 2**62, CheckpointError) as stream, os_errors(file, "cannot be read", CheckpointError):
        header, entries, about = _read_header(file, stream)
        size = os.fstat(stream.fileno()).st_size
        stream.seek(size - 64)
        seal = stream.read(64)
        if sha256(header).digest() != seal[:32]:
            _refuse(file, "a header with the SHA-256 in its seal", "another")
        if verify:
            _verify(file, stream, len(header), size - 64, seal[32:])
        data = _mapped(stream) if mapped else _read(stream, size)
    tensors = {name: _view(data, len(header), entry) for name, entry in entries.items() if name != SEAL}
    return _tree(file, tensors, about, mapped)


def _tensors(tree: Tree) -> dict[str, Parts]:
    """What is saved of a tree: its tensors, keys and values as one."""
    found = {name: getattr(tree, name, None) for name in NAMES}
    return {"pairs": (tree.keys.detach(), tree.values.detach())} | {
        name: (value.detach(),) for name, value in found.items() if value is not None
    }


def _shape_of(tree: Tree) -> dict[str, int]:
    return {"n": tree.plan.n, "branch": tree.plan.branch, "block": tree.plan.block, "longest": tree.longest}


def _header(tensors: dict[str, Parts], plans: dict[str, dict[str, int]], stamp: Stamp | None) -> bytes:
    """Length and text of the header, padded so that the data begin at a page."""
    fingerprint = None if stamp is None else stamp.fingerprint()
    if stamp is not None and fingerprint is None:
        reject("tree", "one whose weights are as they were when it was built", "one whose weights have changed since")
    about = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint or "", "plans": json.dumps(plans)}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, (value, *more) in tensors.items():
        size = value.numel() * value.element_size() * (1 + len(more))
        shape = [*value.shape[:2], 1 + len(more), *value.shape[2:]] if more else [*value.shape]
        header[name] = {"dtype": DTYPES[value.dtype], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header[SEAL] = {"dtype": "U8", "shape": [64], "data_offsets": [end, end + 64]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def _pieces(parts: Parts) -> Iterator[bytes]:
    """The bytes of a tensor, or of several that are stacked, some rows at a time."""
    flat = [part.flatten(0, 1) if part.dim() > 1 else part for part in parts]
    size = max(1, flat[0][:1].numel() * flat[0].element_size() * len(flat))
    for pieces in zip(*(torch.split(part, max(1, PIECE // size)) for part in flat), strict=True):
        piece = pieces[0] if len(pieces) == 1 else torch.stack(pieces, dim=1)
        yield piece.to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read_header(file: Path, stream: Any) -> tuple[bytes, dict[str, Entry], dict[str, str]]:
    """The header as it lies in the file, the entries of its tensors, and what it says about the tree."""
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= MAX_HEADER:
        _refuse(file, f"a header of at most {MAX_HEADER} bytes", length)
    text = stream.read(length)
    try:
        header = json.loads(text)
        about = header.pop("__metadata__")
        if about["format"] != FORMAT:
            _refuse(file, f"format {FORMAT}", repr(about["format"]))
        if about["version"] != VERSION:
            _refuse(file, f"version {VERSION}", repr(about["version"]))
        entries = {name: _entry(**entry) for name, entry in header.items()}
        end = entries[SEAL][3]
        _check_entries(file, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _refuse(file, "the header of a tree", f"{type(error).__name__} {error}")
    size = os.fstat(stream.fileno()).st_size
    if size != 8 + length + end:
        _refuse(file, f"{8 + length + end:,} bytes", f"{size:,}")
    return first + text, entries, about


def _entry(dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, end = data_offsets
    return KINDS[dtype], tuple(map(int, shape)), int(start), int(end)


def _check_entries(file: Path, entries: dict[str, Entry]) -> None:
    """Tensors must follow one another, each as long as its dtype and shape say, the seal last."""
    place = 0
    for name, (dtype, shape, start, end) in entries.items():
        if start != place or min(shape, default=0) < 0 or end - start != dtype.itemsize * prod(shape):
            _refuse(f"{file}: {name}", f"bytes from {place} for {tuple(shape)}", f"{start} to {end}")
        place = end
    if next(reversed(entries)) != SEAL or entries[SEAL][:2] != (torch.uint8, (64,)):
        _refuse(file, "a seal of 64 bytes at the end", entries[SEAL][:2])


def _verify(file: Path, stream: Any, start: int, end: int, expected: bytes) -> None:
    digest = sha256()
    stream.seek(start)
    while start < end:
        piece = stream.read(min(PIECE, end - start))
        if not piece:
            _refuse(file, f"{end + 64:,} bytes", "fewer")
        digest.update(piece)
        start += len(piece)
    if digest.digest() != expected:
        _refuse(file, f"sha256 {expected.hex()}", digest.hexdigest())


def _mapped(stream: Any) -> Tensor:
    """All bytes of the file, read when they are first used."""
    pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)  # a search jumps: reading ahead would read in vain
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # `mapped` trees are not written to
        return torch.frombuffer(pages, dtype=torch.uint8)


def _read(stream: Any, size: int) -> Tensor:
    data = np.empty(size, np.uint8)
    stream.seek(0)
    stream.readinto(data.data)
    return torch.from_numpy(data)


def _view(data: Tensor, start: int, entry: Entry) -> Tensor:
    dtype, shape, first, end = entry
    return data[start + first : start + end].view(dtype).view(shape)


def _tree(file: Path, tensors: dict[str, Tensor], about: dict[str, str], mapped: bool) -> Tree:
    try:
        plans = json.loads(about["plans"])
        beside = _part(tensors, plans["beside."], "beside.", mapped) if "beside." in plans else None
        tree = _part(tensors, plans[""], "", mapped)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        _refuse(file, "the tensors of a tree", f"{type(error).__name__} {error}")
    stamp = Stamp(about["fingerprint"]) if about.get("fingerprint") else None
    return replace(tree, beside=beside, stamp=stamp)


def _part(tensors: dict[str, Tensor], shape: dict[str, int], prefix: str, mapped: bool) -> Tree:
    plan = TreePlan(shape["n"], shape["branch"], shape["block"])
    found: dict[str, Any] = {name: tensors.get(prefix + name) for name in NAMES if name != "pairs"}
    keys, values = tensors[prefix + "pairs"].unbind(dim=2)
    if keys.dim() != 4 or keys.shape[1] != plan.nodes:
        raise ValueError(f"{plan.nodes} nodes expected, got keys {tuple(keys.shape)}")
    return Tree(plan, keys=keys, values=values, longest=shape["longest"], mapped=mapped, **found)


def _refuse(where: object, expected: object, got: object) -> NoReturn:
    raise CheckpointError(f"{where}: expected {expected}, got {got}")
