"""Checks of plain arguments: numbers, names. Does not import torch, so that settings can be read without it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NoReturn

from retreever.errors import InputError

LONGEST = 400  # characters of a wrong value that are shown


def reject(argument: str, expected: str, got: object) -> NoReturn:
    """Raise the one-line `InputError` used everywhere; `got` is cut after LONGEST characters."""
    text = " ".join(str(got).split())
    raise InputError(f"{argument}: expected {expected}, got {text if len(text) <= LONGEST else text[:LONGEST] + '...'}")


def check_bool(argument: str, value: object) -> None:
    """`value` must be True or False; text is refused, since even "no" would count as True."""
    if not isinstance(value, bool):
        reject(argument, "True or False", repr(value))


def check_int(argument: str, value: object, minimum: int) -> None:
    """`value` must be an int (not a bool) of at least `minimum` that fits 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        reject(argument, f"an int >= {minimum}", f"{type(value).__name__} {value!r}")
    if not minimum <= value < 2**63:
        limit = f">= {minimum}" if value < minimum else "< 2**63"
        reject(argument, f"an int {limit}", value if value.bit_length() < 1_000 else "one of more than 300 digits")


def check_number(argument: str, value: object, minimum: float = 0.0, below: float = math.inf) -> None:
    """`value` must be a finite number of at least `minimum` and less than `below`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not (good and minimum <= value < below):  # type: ignore[operator]
        limit = f"in [{minimum:g}, {below:g})" if below < math.inf else f">= {minimum:g}"
        large = isinstance(value, int) and value.bit_length() > 1_100  # Python may refuse to write it out
        reject(argument, f"a number {limit}", "one of more than 300 digits" if large else repr(value))


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        reject(argument, "one of " + ", ".join(choices), repr(value))


def check_path(argument: str, value: object) -> None:
    """Raise unless `value` names a file or folder."""
    if not isinstance(value, str | Path):
        reject(argument, "a path", type(value).__name__)
