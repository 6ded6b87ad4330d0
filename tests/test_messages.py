"""Messages of errors: one line of bounded length that is safe to print, whatever they quote."""

from __future__ import annotations

import pickle

import pytest

import retreever
from retreever.arguments import reject
from retreever.errors import LONGEST, DataError, InputError, RetreeverError, one_line

ERRORS = [getattr(retreever, name) for name in retreever.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("error", ERRORS)
def test_control_characters_and_line_breaks_are_escaped(error: type[RetreeverError]) -> None:
    """Colours, cleared screens, reversed text, and names that are no UTF-8."""
    text = "a\x1b[2Jb\r\nc\x07\u202ed\u2028e\udcff ünd 'π'"
    assert str(error(text)) == "a\\x1b[2Jb\\r\\nc\\x07\\u202ed\\u2028e\\udcff ünd 'π'"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("character", ["x", "\x00", "\U000e0001"])
def test_a_long_message_keeps_both_ends(error: type[RetreeverError], character: str) -> None:
    message = str(error(f"file.json: {character * 10_000_000}: damaged"))
    assert message.startswith("file.json: ") and message.endswith(": damaged")
    assert len(message) <= LONGEST and message.isprintable()


def test_what_is_short_and_printable_stays_as_it_is() -> None:
    for text in ("", "a  b", "x" * LONGEST):
        assert one_line(text) == text == str(DataError(text))
    assert str(DataError()) == ""


def test_an_argument_that_came_from_elsewhere_is_bounded_too() -> None:
    with pytest.raises(InputError) as caught:
        reject("\x1b" * 10_000_000, "an int", "no\nint")
    assert str(caught.value).isprintable() and len(str(caught.value)) <= LONGEST
    assert str(caught.value).endswith(": expected an int, got no int")


def test_errors_travel_between_processes() -> None:
    again = pickle.loads(pickle.dumps(DataError("a\nb")))
    assert isinstance(again, DataError) and str(again) == "a\\nb"
