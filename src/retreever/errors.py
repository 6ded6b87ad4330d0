"""All errors the library raises on purpose. Messages are one line: the argument, what was expected, what was given."""

__all__ = ["BackendError", "CheckpointError", "ConfigError", "DataError", "InputError", "RetreeverError"]

LONGEST = 2_000  # characters of a message


class RetreeverError(Exception):
    """Base of all errors raised by retreever; `status` is the exit status of the command line.

    Messages quote files, servers and arguments; `one_line` makes each safe to print.
    """

    status: int = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class InputError(RetreeverError, ValueError):
    """A tensor or argument passed by the caller is not usable."""


class ConfigError(RetreeverError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(RetreeverError):
    """A data file is absent, damaged or not in the expected format."""


class CheckpointError(RetreeverError):
    """A checkpoint or weights file is absent, damaged or does not fit the model."""


class BackendError(RetreeverError, RuntimeError):
    """The requested implementation or device cannot run on this machine."""


def one_line(text: str) -> str:
    """The text with control characters and line breaks escaped, and its middle left out beyond LONGEST characters."""
    short = _shortened(text)  # before escaping too, which would take long for megabytes
    if not short.isprintable():
        short = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return _shortened(short)


def _shortened(text: str) -> str:
    """Keeps both ends: the start names the file or argument, the end says what is wrong with it."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[: half - 5]} ... {text[-half:]}"
