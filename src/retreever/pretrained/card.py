"""The card beside trained weights: what they are, what they were trained on, what they score. Does not import torch.

Weights are two files: NAME.safetensors, the tensors of the model, and NAME.json, the card, with the settings that build
the model and the sha256 of the tensors.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from retreever.arguments import reject
from retreever.errors import CheckpointError
from retreever.files import os_errors
from retreever.files import read_bytes as read_regular

FORMAT = 2
MAX_BYTES = 4_000_000  # of either file
TOLERANCE = 1e-3
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "dict": dict, "list": list,
}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """A model card.

    Attributes:
        name: of the weights, and of their files.
        title: what the model does.
        use: what goes in and what comes out.
        limits: what it is not for.
        data: what it was trained and tested on.
        terms: of those data.
        license: of the weights.
        model: its kind and settings; they build the model.
        settings: of the recipe it was trained by, task, model, batch and seed among them.
        steps: trained.
        best_step: after which the weights did best on validation, which are these.
        metric: what is scored; more is better.
        scores: on every test set; the first is the main one, "full" reads all leaves with the same weights.
        validation: the score there.
        tolerance: within which scoring again gives the same, relative where a score is larger than one.
        tokens: read per query when the context has `context` tokens.
        context: the largest one, as the paper counts.
        parameters: how many numbers were trained.
        seconds: of training.
        hardware: it was trained on.
        versions: of the software.
        size: of the weights in bytes.
        sha256: of the weights.
        probe: what the model predicts for a small made-up context, in float64.
        format: version of this file's format.
    """

    name: str
    title: str
    use: str
    limits: str
    data: str
    terms: str
    license: str
    model: dict[str, Any]
    settings: dict[str, Any]
    steps: int
    best_step: int
    metric: str
    scores: dict[str, float]
    validation: float
    tolerance: float
    tokens: int
    context: int
    parameters: int
    seconds: float
    hardware: str
    versions: dict[str, str]
    size: int
    sha256: str
    probe: list[float]
    format: int = FORMAT

    def to_text(self) -> str:
        """The text of the card's file (JSON)."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    def differs(self, scores: dict[str, float]) -> list[str]:
        """Names of the scores on the card that the new `scores` do not reproduce."""

        def same(ours: float, card: float) -> bool:
            return abs(ours - card) <= self.tolerance * max(1.0, abs(card))  # NaN is never the same

        return [name for name, card in self.scores.items() if not same(scores.get(name, math.nan), card)]


def weights_folder(folder: str | Path | None = None) -> Traversable:
    """The folder of the weights: `folder`, or the one in the package."""
    return Path(folder) if folder is not None else files("retreever").joinpath("pretrained").joinpath("weights")


def pretrained_names(folder: str | Path | None = None) -> list[str]:
    """Names of all weights in the package, or in `folder`."""
    place = weights_folder(folder)
    with os_errors(str(place), "cannot be read", CheckpointError):
        found = place.iterdir() if place.is_dir() else iter(())
        return sorted(file.name.removesuffix(".json") for file in found if file.name.endswith(".json"))


def read_card(name: str, folder: str | Path | None = None) -> Card:
    """The card of that name; an unknown name raises an `InputError` that lists the known ones."""
    known, place = pretrained_names(folder), weights_folder(folder)
    if not known:
        reject("folder", "one with weights (NAME.json and NAME.safetensors)", place)
    if name not in known:
        where = f" in {folder}" if folder is not None else ""
        reject("name", f"one of {', '.join(known)}{where}", repr(name))
    file = place.joinpath(f"{name}.json")
    try:
        found = json.loads(read_bytes(file, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}") from None
    return _checked(file, name, found)


def read_bytes(file: Traversable, most: int) -> bytes:
    """The contents of a file of at most `most` bytes; on disk, a regular file."""
    if isinstance(file, Path):
        return read_regular(file, most, CheckpointError)
    with os_errors(str(file), "cannot be read", CheckpointError), file.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{file}: expected at most {most} bytes, got more")
    return data


def _checked(file: Traversable, name: str, found: Any) -> Card:
    """The card in `found`, after checking that all entries are present and of their types."""

    def fail(key: str, expected: object, got: object) -> NoReturn:
        raise CheckpointError(f"{file}: {key}: expected {expected}, got {got}")

    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(found).__name__}")
    if found.get("format") != FORMAT:
        fail("format", FORMAT, repr(found.get("format")))
    kinds = {f.name: str(f.type).partition("[")[0] for f in fields(Card)}
    for key in kinds | found:
        if key not in kinds:
            fail(key, "no such entry", "one")
        if key not in found or not isinstance(found[key], _KINDS[kinds[key]]) or isinstance(found[key], bool):
            fail(key, kinds[key], type(found[key]).__name__ if key in found else "none")
    for key in ("task", "model", "batch", "seed"):
        if key not in found["settings"]:
            fail(f"settings.{key}", "an entry", "none")
    if not found["scores"]:
        fail("scores", "one or more", "none")
    for key, value in [("tolerance", found["tolerance"]), *((f"scores.{k}", v) for k, v in found["scores"].items())]:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not abs(value) <= sys.float_info.max:
            fail(key, "a finite number", repr(value))
    if found["name"] != name:
        fail("name", repr(name), repr(found["name"]))
    return Card(**found)
