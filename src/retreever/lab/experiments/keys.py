"""Reads tables of a TOML file key by key; a missing, wrong or unknown key raises an error that names it."""

from __future__ import annotations

from typing import Any, NoReturn

from retreever.errors import ConfigError

KINDS: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
KINDS |= {list: "a list", dict: "a table"}


class Keys:
    """One table of the file; `where` is its dotted name, as an error shows it. Every key is taken once."""

    def __init__(self, table: dict[str, Any], file: str, where: str = "") -> None:
        self.left = dict(table)
        self.file = file
        self.where = where

    def refuse(self, key: str, expected: str, got: object) -> NoReturn:
        """Raise `ConfigError` with one line that names file and key."""
        raise ConfigError(f"{self.file}: {self._name(key)}: expected {expected}, got {got}")

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`; `default` where it is absent."""
        if key not in self.left:
            return default
        value = self.left.pop(key)
        wanted = (int, float) if kind is float else (kind,)
        if type(value) not in wanted:
            self.refuse(key, KINDS[kind], repr(value))
        return value

    def need(self, key: str, kind: type) -> Any:
        """The value of `key`, which must be present."""
        if key not in self.left:
            self.refuse(key, KINDS[kind], "nothing")
        return self.take(key, kind)

    def take_list(self, key: str, kind: type, default: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """A list of values of one kind, all different."""
        values = self.take(key, list, list(default))
        if any(type(value) is not kind for value in values) or len({*values}) != len(values):
            self.refuse(key, f"a list, each {KINDS[kind]}, all different", values)
        return tuple(values)

    def take_tables(self, key: str) -> dict[str, Keys]:
        """Tables by their keys, in the order of the file."""
        inner = Keys(self.need(key, dict), self.file, self._name(key))
        names = list(inner.left)
        return {name: Keys(inner.take(name, dict), self.file, inner._name(name)) for name in names}

    def take_choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of `choices`; empty where `key` is absent."""
        value: str = self.take(key, str, "")
        if value and value not in choices:
            self.refuse(key, "one of " + ", ".join(choices), repr(value))
        return value

    def finish(self) -> None:
        """Raise `ConfigError` if keys are left over, so that a misspelt key is not ignored."""
        for key in self.left:
            self.refuse(key, "no such key", repr(self.left[key]))

    def _name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key
