"""Request bodies: bytes to a JSON object, with every way to be wrong answered by a sentence that says where.

It knows JSON; it knows no field names. Only what JSON itself allows passes: no NaN, no infinity.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from specdec.errors import InvalidRequestError
from specdec.server.refusals import path_of
from specdec.tokenizer import has_unpaired_surrogate

MAX_DIGITS = 1000
"""Of an integer, where one in the body is longer than Python reads; a longer one is then named."""

MAX_SEARCHED = 200_000
"""Values of a body among which a wrong one is looked for, so that its place can be told."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands in a body for a number that is none here."""

    spelling: str


def _finite(digits: str) -> float | _Unreadable:
    value = float(digits)
    return value if math.isfinite(value) else _Unreadable(digits)


def _short(digits: str) -> int | _Unreadable:
    return int(digits) if len(digits) <= MAX_DIGITS else _Unreadable(digits)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    >>> parse_object(b'{"n": 1}')
    {'n': 1}
    >>> parse_object(b'{"messages": [{"content": NaN}]}')
    Traceback (most recent call last):
    specdec.errors.InvalidRequestError: messages[0].content is NaN; numbers must be finite
    """
    if not raw.strip():
        raise InvalidRequestError("the body is empty; send a JSON object")
    try:
        text = raw.decode("utf-8-sig")  # with or without a mark of the byte order, which some clients send
        value, is_readable = _parse(text)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"the body is a JSON {_kind(value)}; send an object")
        if not (is_readable and ("\\u" not in text or _is_text(value))):
            raise _refusal(value)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is invalid") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    return value


def _parse(text: str) -> tuple[Any, bool]:
    """What a text holds, and whether all of its numbers could be read."""
    unreadable: list[_Unreadable] = []

    def note(value: Any) -> Any:
        if isinstance(value, _Unreadable):
            unreadable.append(value)
        return value

    hooks = {"parse_constant": lambda name: note(_Unreadable(name)), "parse_float": lambda d: note(_finite(d))}
    try:
        value = json.loads(text, **hooks)  # type: ignore[arg-type]
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of thousands of digits; it is looked for at leisure
        value = json.loads(text, parse_int=lambda d: note(_short(d)), **hooks)  # type: ignore[arg-type]
    return value, not unreadable


def _is_text(value: dict[str, Any]) -> bool:
    """False where JSON spells half of a surrogate pair, which is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {"list": "array", "str": "string", "bool": "boolean"}.get(type(value).__name__, "number")


def _refusal(body: dict[str, Any]) -> InvalidRequestError:
    """The error of a body that holds what is no value, with its place where that is found soon."""
    for path, value in itertools.islice(_leaves(body), MAX_SEARCHED):
        is_readable_path = not any(isinstance(part, str) and has_unpaired_surrogate(part) for part in path)
        where = shown_path(path) if is_readable_path else "the name of a field"
        param = str(path[0]) if is_readable_path else None
        if isinstance(value, _Unreadable):
            limit = f" and have at most {MAX_DIGITS} digits" if len(value.spelling) > MAX_DIGITS else ""
            return InvalidRequestError(
                f"{where} is {_spelt(value.spelling)}; numbers must be finite{limit}", param=param
            )
        if not is_readable_path or (isinstance(value, str) and has_unpaired_surrogate(value)):
            return InvalidRequestError(
                f"{where} holds an unpaired surrogate (\\ud800 to \\udfff); send whole characters", param=param
            )
    return InvalidRequestError(
        "the body holds a number that is not finite (or far too long) or an unpaired surrogate; send neither"
    )


def _leaves(body: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every value of a body, containers too, with its place."""
    left: list[Iterator[tuple[Path, Any]]] = [_items((), body)]
    while left:
        for path, value in left[-1]:
            yield path, value
            if isinstance(value, (dict, list)):
                left.append(_items(path, value))
                break
        else:
            left.pop()


def _items(path: Path, value: dict[str, Any] | list[Any]) -> Iterator[tuple[Path, Any]]:
    pairs: Iterable[tuple[str | int, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    return (((*path, part), item) for part, item in pairs)


def shown_path(path: Path) -> str:
    """A place in a body, short enough for a sentence."""
    text = path_of(path)
    return text if len(text) <= 80 else text[:77] + "..."


def _spelt(digits: str) -> str:
    return digits if len(digits) <= 40 else f"{digits[:37]}... ({len(digits)} characters)"
