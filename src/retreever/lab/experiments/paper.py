"""The numbers the paper prints, from experiments/paper.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retreever.errors import ConfigError
from retreever.train.run import read_json


@dataclass(frozen=True)
class Printed:
    """One value of the paper; `mean` is None where it prints a word (OOM) instead of a number."""

    mean: float | None
    std: float | None
    text: str
    tokens_percent: float | None


@dataclass(frozen=True)
class Paper:
    """All tables of the paper: id -> rows."""

    file: Path
    tables: dict[str, list[dict[str, Any]]]

    def find(self, tables: Sequence[str], system: str, setting: dict[str, Any]) -> Printed | None:
        """The row of `system` with exactly this setting in the first table that has one; None if none has."""
        for name in tables:
            if name not in self.tables:
                raise ConfigError(f"{self.file}: expected a table {name!r}, got only {', '.join(self.tables)}")
            for row in self.tables[name]:
                if row["system"] == system and row["setting"] == setting:
                    return Printed(row["mean"], row["std"], row["printed"], row["tokens_percent"])
        return None


def load_paper(folder: Path) -> Paper:
    """The paper's numbers in the folder of the recipe files."""
    file = folder / "paper.json"
    try:
        return Paper(file, {table["id"]: table["rows"] for table in read_json(file)["tables"]})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: expected tables with id and rows, got {error!r}") from None
