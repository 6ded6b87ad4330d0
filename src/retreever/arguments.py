"""Checks of plain arguments: numbers, names. Free of torch, so that settings can be read before it is loaded."""

from __future__ import annotations

import math
from typing import NoReturn

from retreever.errors import InputError

LONGEST = 400  # characters of a wrong value that are shown


def reject(argument: str, expected: str, got: object) -> NoReturn:
    """Raise the one-line `InputError` used everywhere; what came is cut where it gets long."""
    text = " ".join(str(got).split())
    raise InputError(f"{argument}: expected {expected}, got {text if len(text) <= LONGEST else text[:LONGEST] + '...'}")


def check_bool(argument: str, value: object) -> None:
    """`value` must be True or False: any text, "no" too, would count as True."""
    if not isinstance(value, bool):
        reject(argument, "True or False", repr(value))


def check_int(argument: str, value: object, minimum: int) -> None:
    """`value` must be an int (not a bool) of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        reject(argument, f"an int >= {minimum}", f"{type(value).__name__} {value!r}")
    if value < minimum:
        reject(argument, f"an int >= {minimum}", value)


def check_number(argument: str, value: object, minimum: float = 0.0, below: float = math.inf) -> None:
    """`value` must be a finite number of at least `minimum` and less than `below`."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not (good and minimum <= float(value) < below):  # type: ignore[arg-type]
        limit = f"in [{minimum:g}, {below:g})" if below < math.inf else f">= {minimum:g}"
        reject(argument, f"a number {limit}", repr(value))


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        reject(argument, "one of " + ", ".join(choices), repr(value))
