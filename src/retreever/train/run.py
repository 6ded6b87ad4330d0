"""A run folder: config.json, metrics.jsonl, result.json, checkpoints. Nothing in it is overwritten unless asked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retreever.errors import CheckpointError, ConfigError
from retreever.files import os_errors, write_text

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

Translate = Callable[[dict[str, Any]], dict[str, Any]]
_CLAIMED: dict[Path, int] = {}  # open, locked settings of the runs under way in this process


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One line of JSON per look at the validation set."""
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """What came out, written at the end."""
        return self.path / "result.json"

    def start(
        self, config: dict[str, Any], resume: bool, overwrite: bool, translate: Translate = lambda saved: saved
    ) -> None:
        """Make the folder and leave the settings in it; an existing run is refused, resumed or replaced as told.

        `translate` turns settings that an earlier version saved into those of this one, to be compared with `config`.
        """
        if (self.path / "config.json").exists() and not overwrite:
            if not resume:
                raise ConfigError(f"out: expected a new folder, got the run {self.path} (--resume or --overwrite)")
            saved = self.config()
            found = translate(saved)
            if found != json.loads(json.dumps(config)):
                keys = sorted(k for k in {*found, *config} if found.get(k) != _plain(config.get(k)))
                before = ", ".join(f"{key}={found.get(key)}" for key in keys)
                now = ", ".join(f"{key}={_plain(config.get(key))}" for key in keys)
                raise ConfigError(f"resume: expected the settings of {self.path}, {before}, got {now}")
            if self.result.exists():  # of a finished run there is nothing to go on with
                return
            if saved.get("format") != config.get("format"):
                raise ConfigError(
                    f"resume: expected a run of this version, got {self.path}, begun by an older one, which draws other"
                    " random numbers; its checkpoints can be scored, and --overwrite begins anew"
                )
            self._claim()
            return
        if self.path.exists() and any(self.path.iterdir()):
            if not (self.path / "config.json").exists():
                raise ConfigError(f"out: expected a new folder or a run, got {self.path} with other files in it")
            self._claim()
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.json", json.dumps(config, indent=1) + "\n", ConfigError)
        self._claim()

    def _claim(self) -> None:
        """Lock the settings until the run is finished or this process ends; refused while another holds them."""
        self._release()
        if fcntl is None:
            return
        with os_errors(self.path, "cannot be written", ConfigError):
            file = os.open(self.path / "config.json", os.O_RDWR)  # over a network a lock needs the right to write
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ConfigError(f"out: expected a run nobody works on, got {self.path}, in use by a process") from None
        except OSError:  # a file system without locks
            pass
        _CLAIMED[self.path.resolve()] = file

    def _release(self) -> None:
        held = _CLAIMED.pop(self.path.resolve(), None)
        if held is not None:
            os.close(held)

    def config(self) -> dict[str, Any]:
        """The settings the run was started with."""
        if not (self.path / "config.json").exists():
            raise ConfigError(f"{self.path}: expected the folder of a run, got one without config.json")
        return read_json(self.path / "config.json")

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Append one line."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def keep_metrics(self, lines: int) -> None:
        """Cut what was written after the checkpoint a run goes on from: it will be written again."""
        if self.metrics.exists():
            kept = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            write_text(self.metrics, "".join(kept), CheckpointError)

    def finish(self, result: dict[str, Any]) -> None:
        """Leave the result."""
        write_text(self.result, json.dumps(result, indent=1) + "\n", CheckpointError)
        self._release()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected readable JSON, got {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(found).__name__}")
    return found
