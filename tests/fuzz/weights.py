"""Targets that hold weights: checkpoints, and cards of pretrained models with their tensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
from edits import Edit, Files, bytes_of, content, json_of, read_files, special_of, spoil_json
from runner import Target
from tensors import header_of, tensors_of
from trained import RECIPE, a_trainer, command, finished_run

from retreever.lab.pretrained.export import export_run
from retreever.lab.pretrained.probe import probe
from retreever.lab.recipes.command import load_run
from retreever.models.perceiver_io import PerceiverIO
from retreever.models.saved import model_to_json
from retreever.pretrained.card import read_card
from retreever.pretrained.load import load_pretrained
from retreever.train.checkpoint import MANIFEST, STATE, TENSORS
from retreever.train.resume import resume_from, save
from retreever.train.run import RunFolder

STEP = "checkpoints/step-000000006"


def checkpoints(base: Path) -> Target:
    """A run stopped after step 6; its checkpoint is resumed from, or loaded to be scored."""
    folder, trainer = RunFolder(base / "stopped"), a_trainer()
    folder.start(RECIPE.to_json(), resume=False, overwrite=False)
    while trainer.step < 6:
        trainer.advance()
    save(folder, trainer)
    manifest, state, tensors = (f"{STEP}/{name}" for name in (MANIFEST, STATE, TENSORS))
    edits = [
        bytes_of(manifest, state, tensors), special_of(manifest, state, tensors), json_of(manifest),
        *[rehashed(json_of(state))] * 4, rehashed(bytes_of(state)), rehashed(bytes_of(tensors)),
        *[rehashed(tensors_of(tensors))] * 4, *[rehashed(header_of(tensors))] * 2, moved,
    ]  # fmt: skip
    return Target("checkpoint", read_files(folder.path), edits, [resume, resume, load_last])


def resume(folder: Path) -> None:
    """And a step: what was put back wrongly shows there."""
    trainer = a_trainer()
    resume_from(RunFolder(folder), trainer)
    if not trainer.done:
        trainer.advance()


def load_last(folder: Path) -> None:
    load_run(folder, "last")


def rehashed(edit: Edit) -> Edit:
    """The edit, after which the manifest describes what is there, so that the checks behind it are reached."""

    def both(random: Random, files: Files) -> str:
        note = edit(random, files)
        manifest = json.loads(content(files, f"{STEP}/{MANIFEST}"))
        for name in (STATE, TENSORS):
            data = content(files, f"{STEP}/{name}")
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        described = _described(content(files, f"{STEP}/{TENSORS}"))
        if described and random.random() < 0.8:
            manifest["tensors"] = described
        files[f"{STEP}/{MANIFEST}"] = json.dumps(manifest).encode()
        return f"{note}, hashes in order"

    return both


def _described(data: bytes) -> dict[str, Any]:
    """Dtype and shape of all tensors, where the file is one."""
    try:
        return {
            name: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            for name, value in safetensors.torch.load(data).items()
        }
    except Exception:  # whatever it is, the library has to say it
        return {}


def moved(random: Random, files: Files) -> str:
    """Give the checkpoint another number."""
    name = random.choice(("step-000000009", "step-999999999999", "step-٠٠٠٠٠٠٠٠٦", "step-000000000006", "best"))
    for file in [file for file in files if file.startswith(STEP)]:
        files[file.replace(STEP, f"checkpoints/{name}")] = files.pop(file)
    return f"renamed to {name}"


def cards(base: Path) -> Target:
    """Weights with their cards: one exported from a run, one of a Perceiver IO, whose latents are a size of its own."""
    run, out = finished_run(base / "for-cards"), base / "weights"
    export_run(run, "tiny", out)
    model = PerceiverIO(dim=8, hidden=8, layers=1, heads=2, latents=3)
    data = safetensors.torch.save(dict(model.state_dict()))
    card = replace(
        read_card("tiny", out), name="latent", model=model_to_json(model), size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    files = read_files(out) | {"latent.safetensors": data, "latent.json": card.to_text().encode()}
    texts, tensors = ("tiny.json", "latent.json"), ("tiny.safetensors", "latent.safetensors")
    edits = [
        bytes_of(*texts, *tensors), special_of(*texts, *tensors), *[json_of(*texts)] * 2,
        *[entry_of("model", *texts)] * 6, carded(tensors_of(*tensors)), carded(header_of(*tensors)),
        carded(bytes_of(*tensors)),
    ]  # fmt: skip
    return Target("card", files, edits, [load_cards, load_cards, load_cards, list_cards, page_of_cards])


def entry_of(key: str, *names: str) -> Edit:
    """Spoil what is in one entry of one of the JSON files."""

    def edit(random: Random, files: Files) -> str:
        name = random.choice(names)
        card = json.loads(content(files, name))
        text, note = spoil_json(random, card[key])
        whole = json.dumps(card | {key: "here"}).encode()
        files[name] = whole.replace(b'"here"', text)
        return f"{name}: {key}: {note}"

    return edit


def carded(edit: Edit) -> Edit:
    """The edit, after which the cards have size and hash of their files."""

    def both(random: Random, files: Files) -> str:
        note = edit(random, files)
        for name in ("tiny", "latent"):
            data, card = content(files, f"{name}.safetensors"), json.loads(content(files, f"{name}.json"))
            card |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            files[f"{name}.json"] = json.dumps(card).encode()
        return f"{note}, hashes in order"

    return both


def load_cards(folder: Path) -> None:
    for name in ("tiny", "latent"):
        probe(load_pretrained(name, folder))


def list_cards(folder: Path) -> str | None:
    return command("pretrained", "list", "--weights", str(folder))


def page_of_cards(folder: Path) -> str | None:
    return command("pretrained", "page", "--weights", str(folder), "--out", str(folder / "page.md"))
