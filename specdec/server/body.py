"""Request bodies: bytes to a JSON object, with every way to be wrong answered by a sentence.

It knows JSON; it knows no field names. Only what JSON itself allows passes: no NaN, no infinity.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from specdec.errors import InvalidRequestError


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body holds {name}; JSON numbers must be finite")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequestError(f"the body holds {digits[:40]}, which is too large; numbers must be finite")
    return value


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    >>> parse_object(b'{"n": 1}')
    {'n': 1}
    """
    if not raw.strip():
        raise InvalidRequestError("the body is empty; send a JSON object")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is invalid") from error
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:  # broken JSON, or an integer of thousands of digits
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is a JSON {_kind(value)}; send an object")
    if "\\u" in text:
        _refuse_half_characters(value)
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {"list": "array", "str": "string", "bool": "boolean"}.get(type(value).__name__, "number")


def _refuse_half_characters(value: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the body holds an unpaired surrogate (\\ud800 to \\udfff); send whole characters"
        ) from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
