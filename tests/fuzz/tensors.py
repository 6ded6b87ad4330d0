"""Edits of safetensors files: whole tensors, or the header alone."""

from __future__ import annotations

import json
from random import Random

import safetensors.torch
import torch
from edits import Edit, Files, content, spoil_json
from torch import Tensor


def tensors_of(*names: str) -> Edit:
    """Change tensors of one of the files: name, dtype, shape, values, missing, more."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        tensors = safetensors.torch.load(content(files, name))
        notes = [_change_tensor(random, tensors) for _ in range(random.choice((1, 1, 2)))]
        files[name] = safetensors.torch.save({key: value.clone() for key, value in tensors.items()})
        return f"{name}: {', '.join(notes)}"

    return edit


def _change_tensor(random: Random, tensors: dict[str, Tensor]) -> str:
    key = random.choice(sorted(tensors))
    old, prefix = tensors[key], key.partition(".")[0]
    change = random.choice(("rename", "drop", "drop all", "add", "dtype", "shape", "shape", "values", "values", "swap"))
    if change == "rename":
        tensors[random.choice((f"{key}x", key[1:], "", "\x1b[31m\n", "x" * 3_000))] = tensors.pop(key)
    elif change.startswith("drop"):
        for name in [key] if change == "drop" else [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        tensors.setdefault("rest", torch.zeros(1))
    elif change == "add":
        tensors[f"{prefix}.more"] = torch.zeros(random.choice((0, 1, 5)))
    elif change == "dtype":
        tensors[key] = old.to(random.choice((torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool)))
    elif change == "shape":
        tensors[key] = random.choice(
            (torch.zeros(0), torch.zeros(1), old.flatten(), old[None], old.repeat(2, *[1] * old.dim()))
        )
    elif change == "values":
        fill = random.choice((0, 1, 255, -1, float("nan"), float("inf"), 1e30))
        tensors[key] = torch.full_like(old, fill if old.is_floating_point() else random.randrange(256))
    else:
        other = random.choice(sorted(tensors))
        tensors[key], tensors[other] = tensors[other], tensors[key]
    return f"{change} {key}"


def header_of(*names: str) -> Edit:
    """Change the JSON header of one of the safetensors files; its length is kept right."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        data = content(files, name)
        end = 8 + int.from_bytes(data[:8], "little")
        header, note = spoil_json(random, json.loads(data[8:end]))
        files[name] = len(header).to_bytes(8, "little") + header + data[end:]
        return f"{name}: header: {note}"

    return edit
