"""Errors: everything the engine raises on purpose, and who is to blame.

    SpecdecError
    ├── InvalidRequestError (ValueError)   the caller's values; HTTP 400
    │   └── ContextLengthError             the prompt does not fit; code context_length_exceeded
    ├── ModelLoadError                     a checkpoint that cannot be served, and why
    │   └── UnsupportedModelError          ... because the engine would compute it wrongly
    ├── RequestFailedError                 one request failed inside a step; its neighbours go on
    └── EngineDeadError                    the engine stopped; HTTP 503

It knows no models, no HTTP and no devices: the server maps classes to status codes.
"""

from __future__ import annotations


class SpecdecError(Exception):
    """The root of all errors raised on purpose."""


MAX_SHOWN = 80


def shown(value: object) -> str:
    """A value as a message quotes it: whole where it is short, and never an error of its own.

    >>> shown("a" * 200)[-6:], len(shown("a" * 200)), shown(1.5)
    ('aaa...', 80, '1.5')
    >>> shown(10**5000)
    'a value of type int that cannot be shown'
    """
    try:
        text = repr(value)
    except Exception:  # nested too deeply, too many digits, or a type whose own repr fails
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class InvalidRequestError(SpecdecError, ValueError):
    """A value at the door is wrong; the message names the parameter, the value and the limit.

    param   the name of the offending parameter, for OpenAI's error shape
    code    OpenAI's error code, or None
    """

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a token within the model length or the cache."""

    code = "context_length_exceeded"


class ModelLoadError(SpecdecError):
    """A checkpoint cannot be served as it is."""


class UnsupportedModelError(ModelLoadError):
    """The model would load, but the engine would not compute what it means."""


class RequestFailedError(SpecdecError):
    """One request failed inside a step (for example: its logits were not finite)."""


class EngineDeadError(SpecdecError):
    """The engine has stopped and takes no more requests."""
