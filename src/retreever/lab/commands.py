"""Commands with subcommands. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any

from tyro.conf import subcommand as named


def one_of(commands: Mapping[str, Any]) -> Any:
    """The union of commands, each under its name."""
    return reduce(or_, (Annotated[kind, named(name, prefix_name=False)] for name, kind in commands.items()))


def group(about: str, what: Any) -> Any:
    """A command that runs one of a union of subcommands."""
    space = {"__doc__": about, "run": lambda self: self.what.run()}
    return make_dataclass("Group", [("what", what)], namespace=space, frozen=True)
