"""Finished runs become two small files; what may not or need not be given on is refused, and nothing is written."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from retreever import ConfigError
from retreever.cli import main
from retreever.lab.pretrained import export
from retreever.lab.pretrained.about import ABOUT, NEVER
from retreever.lab.pretrained.export import export_run
from retreever.lab.recipes.tasks import TASKS
from retreever.pretrained.card import read_card


def edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def refused(arguments: list[str | Path], expected: str, capsys: pytest.CaptureFixture[str], out: Path) -> None:
    before = {file: file.read_bytes() for file in out.iterdir()} if out.exists() else None
    assert main(["pretrained", "export", *map(str, arguments), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert before == ({file: file.read_bytes() for file in out.iterdir()} if out.exists() else None)


def test_the_card_says_what_the_run_was(trained: Path, exported: Path) -> None:
    card, result = read_card("tiny", exported), json.loads((trained / "result.json").read_text())
    assert card.settings == json.loads((trained / "config.json").read_text())
    for key in ("scores", "metric", "validation", "steps", "tokens", "context", "parameters", "hardware", "versions"):
        assert getattr(card, key) == result[key]
    assert card.best_step in (4, 8) and card.tolerance == 1e-3 and card.data.startswith("generated")
    data = (exported / "tiny.safetensors").read_bytes()
    assert card.size == len(data) < 2_000_000 and card.sha256 == sha256(data).hexdigest()
    assert sorted(file.name for file in exported.iterdir()) == ["tiny.json", "tiny.safetensors"]


def test_exporting_twice_gives_the_same_files(trained: Path, exported: Path, tmp_path: Path) -> None:
    export_run(trained, "tiny", tmp_path / "new")
    for file in exported.iterdir():
        assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_overwritten_unless_asked(trained: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused([trained, "tiny"], "(--overwrite)", capsys, folder)
    assert main(["pretrained", "export", str(trained), "tiny", "--out", str(folder), "--data-note", "mine",
                 "--overwrite"]) == 0  # fmt: skip
    assert read_card("tiny", folder).data == "mine"
    (folder / "tiny.json").unlink()  # weights alone are somebody's too
    refused([trained, "tiny"], "tiny.safetensors (--overwrite)", capsys, folder)


def test_nothing_trained_on_celeba_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / "config.json", task="celeba")
    refused([run, "faces"], "no redistribution", capsys, tmp_path / "out")


def test_unfinished_runs_and_bad_names_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for name in ("../x", "Tiny", "a b", "-a", "", "a--b", "x.json"):
        with pytest.raises(ValueError, match="name: expected lower-case letters"):
            export_run(run, name, out)
    refused([tmp_path / "absent", "tiny"], "absent: expected the folder of a run", capsys, out)
    edit(run / "result.json", scores={"test": float("nan")})
    refused([run, "tiny"], "scores.test: expected a finite number, got nan", capsys, out)
    edit(run / "result.json", scores={"test": "good"})
    refused([run, "tiny"], "scores.test: expected a finite number, got good", capsys, out)
    edit(run / "result.json", scores=[1.0])
    refused([run, "tiny"], "scores: expected an object, got list", capsys, out)
    edit(run / "result.json", scores=None)
    refused([run, "tiny"], "result.json: scores: expected an entry, got none", capsys, out)
    (run / "result.json").unlink()
    refused([run, "tiny"], "expected a finished run", capsys, out)


def test_a_setting_of_the_wrong_type_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"layers": 6', '"layers": "6"'))
    refused([run, "tiny"], "layers: expected an int >= 0, got str '6'", capsys, tmp_path / "out")


def test_large_weights_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_BYTES", 1000)
    refused([trained, "tiny"], "expected weights of at most 1,000 bytes, got", capsys, tmp_path / "out")


def test_who_trained_on_files_must_say_which(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ABOUT, "copy", ABOUT["emnist"])
    with pytest.raises(ValueError, match="data_note: expected what the copy files were"):
        export_run(run, "tiny", tmp_path / "out")
    export_run(run, "tiny", tmp_path / "out", "copied by hand")
    assert read_card("tiny", tmp_path / "out").data == "copied by hand"


def test_every_task_is_described_or_never_exported() -> None:
    assert sorted([*ABOUT, *NEVER]) == sorted(TASKS)
    assert [name for name, about in ABOUT.items() if not about.data] == ["emnist", "activity"]


def test_a_write_that_fails_leaves_no_card(trained: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ConfigError("disk full")

    monkeypatch.setattr(export, "write_bytes", broken)
    with pytest.raises(ConfigError, match="disk full"):
        export_run(trained, "tiny", folder, overwrite=True)
    assert not (folder / "tiny.json").exists()
