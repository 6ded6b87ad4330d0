"""Every error the library raises on purpose. One clear line each: the argument, what was expected, what came."""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InputError",
    "RetreeverError",
]


class RetreeverError(Exception):
    """Base of all errors raised by retreever; `status` is what the command they end leaves with."""

    status: int = 2


class InputError(RetreeverError, ValueError):
    """A tensor or argument passed by the caller is not usable."""


class ConfigError(RetreeverError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(RetreeverError):
    """A data file is absent, damaged or not what its format promises."""


class CheckpointError(RetreeverError):
    """A checkpoint or weights file cannot be trusted or does not fit."""


class BackendError(RetreeverError, RuntimeError):
    """The implementation asked for cannot run here."""
