"""A run folder: config.json, metrics.jsonl, result.json, checkpoints. Nothing in it is overwritten unless asked.

`.lock` is made once and never replaced: the process that works on the run holds a lock on it, and it names the run, so
that checkpoints of other runs are told apart.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retreever.errors import CheckpointError, ConfigError
from retreever.files import os_errors, read_bytes, write_text

if TYPE_CHECKING:  # torch is not needed to look at a run
    from retreever.train.protocols import Record

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

Translate = Callable[[dict[str, Any]], dict[str, Any]]
MAX_JSON = 10_000_000  # bytes of a settings or result file
_DRAFT = re.compile(r"\.(config\.json|metrics\.jsonl|result\.json)\.[0-9a-f]{8}\.tmp")  # left by a killed writer
_CLAIMED: dict[Path, int] = {}  # open, locked files of the runs this process works on


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files; `argument` is what errors call it."""

    path: Path
    argument: str = "out"

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
        """Scores and facts of a finished run."""
        return self.path / "result.json"

    @property
    def lock(self) -> Path:
        """The file that the process at work locks; it holds the name of the run."""
        return self.path / ".lock"

    def start(
        self, config: dict[str, Any], resume: bool, overwrite: bool, translate: Translate = lambda saved: saved
    ) -> None:
        """Make the folder and save the settings in it. An existing run is refused, or resumed or replaced if asked.

        `translate` turns settings that an earlier version saved into those of this one, to be compared with `config`.
        """
        self._check_owner()
        kept = self._has_settings and not overwrite
        if kept and resume and self.result.exists():  # finished: there is nothing to go on with
            self._check_settings(config, translate)
            return
        with os_errors(self.path, "cannot be written", ConfigError):
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
            try:
                self._begin(config, resume, overwrite, translate)
            except BaseException:
                self._release()
                raise

    def _begin(self, config: dict[str, Any], resume: bool, overwrite: bool, translate: Translate) -> None:
        """Go on with the run in the folder, or leave a new one there; the lock is held."""
        self._check_owner()  # again: another process may have worked here until the lock was free
        if self._has_settings and not overwrite:
            if not resume:
                raise ConfigError(
                    f"{self.argument}: expected a new folder, got the run {self.path} (--resume or --overwrite)"
                )
            self._check_settings(config, translate)
            self._tidy()
            return
        self._clear()
        self._name()
        write_text(self.path / "config.json", json.dumps(config, indent=1) + "\n", ConfigError)

    @property
    def _has_settings(self) -> bool:
        return (self.path / "config.json").exists()

    def _check_owner(self) -> None:
        """Refuse a folder that holds files and no run; what a killed start left is no obstacle."""
        if self._has_settings or not self.path.exists():
            return
        with os_errors(self.path, "cannot be read", ConfigError):
            others = [entry.name for entry in self.path.iterdir() if entry.name != ".lock"]
        if not all(_DRAFT.fullmatch(name) for name in others):
            raise ConfigError(
                f"{self.argument}: expected a new folder or a run, got {self.path} with other files in it"
            )

    def _check_settings(self, config: dict[str, Any], translate: Translate) -> None:
        """A run is resumed with the settings and by the version it was started with."""
        saved = self.config()
        found, wanted = translate(saved), _plain(config)
        keys = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if keys:
            before = ", ".join(f"{key}={found.get(key)!r}" for key in keys)
            now = ", ".join(f"{key}={wanted.get(key)!r}" for key in keys)
            raise ConfigError(f"resume: expected the settings of {self.path}, {before}, got {now}")
        if saved.get("format") != config.get("format") and not self.result.exists():
            raise ConfigError(
                f"resume: expected a run of this version, got {self.path}, begun by an older one, which draws other"
                " random numbers; its checkpoints can be scored, and --overwrite begins anew"
            )

    def _claim(self) -> None:
        """Lock the run until it is finished or this process ends; refused while another process holds it."""
        self._release()
        file = os.open(self.lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ConfigError(
                f"{self.argument}: expected a run nobody works on, got {self.path}, in use by a process"
            ) from None
        except OSError:  # a file system without locks
            pass
        _CLAIMED[self.path.resolve()] = file

    def _release(self) -> None:
        held = _CLAIMED.pop(self.path.resolve(), None)
        if held is not None:
            os.close(held)

    def _tidy(self) -> None:
        for entry in self.path.iterdir():
            if _DRAFT.fullmatch(entry.name):
                entry.unlink()

    def _clear(self) -> None:
        """Delete everything but the lock, the settings last: killed on the way, it is still known as a run."""
        entries = [entry for entry in self.path.iterdir() if entry.name != ".lock"]
        for entry in sorted(entries, key=lambda path: path.name == "config.json"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _name(self) -> None:
        """Give the run a new name, in place: the lock is on this very file."""
        file = _CLAIMED[self.path.resolve()]
        os.ftruncate(file, 0)
        os.pwrite(file, secrets.token_hex(8).encode(), 0)
        os.fsync(file)

    def name(self) -> str:
        """What tells the checkpoints of this run from those of others; empty where `start` was not called."""
        if not self.lock.exists():
            return ""
        return read_bytes(self.lock, 100, CheckpointError).decode("ascii", "replace")

    def config(self) -> dict[str, Any]:
        """The settings the run was started with."""
        if not self._has_settings:
            raise ConfigError(f"{self.path}: expected the folder of a run, got one without config.json")
        return read_json(self.path / "config.json")

    def write_metrics(self, history: Sequence[Record]) -> None:
        """All looks at the validation set so far, in one step: a reader never meets half a line."""
        lines = [json.dumps(asdict(record)) + "\n" for record in history]
        write_text(self.metrics, "".join(lines), CheckpointError)

    def finish(self, result: dict[str, Any]) -> None:
        """Save the result and give up the lock."""
        write_text(self.result, json.dumps(result, indent=1) + "\n", CheckpointError)
        self._release()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`."""
    data = read_bytes(file, MAX_JSON, ConfigError)
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected readable JSON, got {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(found).__name__}")
    return found
