"""StructuredOutputsParams: which texts an output may be, under vLLM's names.

It knows names, types and that exactly one of them is meant; whether a grammar compiles is known where
the model's tokenizer is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specdec.errors import InvalidRequestError, shown

MAX_GRAMMAR_CHARS = 2**20
MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _fail(name: str, value: object, rule: str) -> InvalidRequestError:
    param = f"structured_outputs.{name}"
    return InvalidRequestError(f"{param} is {shown(value)}; it must be {rule}", param="structured_outputs")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_GRAMMAR_CHARS:
        raise _fail(name, value, f"a text of 1 to {MAX_GRAMMAR_CHARS} characters")
    return value


def _schema_text(value: object) -> str:
    """A schema as JSON; a text must hold JSON already."""
    rule = "a JSON schema: an object, true, false, or one of these as a text"
    if not isinstance(value, (str, dict, bool)):
        raise _fail("json", value, rule)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _fail("json", value, f"{rule} ({error})") from None
    if not isinstance(schema, (dict, bool)):
        raise _fail("json", value, rule)
    return _text("json", text)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an output must match; exactly one of the first five is given.

    json                           a JSON schema, as an object or a text
    regex                          the whole output matches it
    choice                         the output is one of these texts
    grammar                        in Lark's or GBNF's notation; the output derives from `start` or `root`
    json_object                    True: any JSON object
    disable_any_whitespace         JSON is written without spaces and line ends between its parts
    disable_additional_properties  objects hold only the properties their schema names
    whitespace_pattern             a regex for what may stand between the parts of JSON; without it at most 32
                                   spaces, tabs and line ends in a row, so that no model loses itself in them
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs gives {', '.join(given) or 'none'} of {', '.join(KINDS)}; it must give one",
                param="structured_outputs",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "true or false")
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", self.whitespace_pattern)
        object.__setattr__(self, "_checked", (given[0], self._checked_text(given[0])))

    def _checked_text(self, kind: str) -> str:
        value = getattr(self, kind)
        if kind == "json":
            return _schema_text(value)
        if kind == "json_object":
            if value is not True:
                raise _fail(kind, value, "true (leave it out otherwise)")
            return '{"type": "object"}'
        if kind == "choice":
            rule = f"a list of 1 to {MAX_CHOICES} texts that are not empty"
            if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
                raise _fail(kind, value, rule)
            if any(not isinstance(text, str) or not text for text in value):
                raise _fail(kind, value, rule)
            return _text(kind, json.dumps(list(value)))
        return _text(kind, value)

    @property
    def kind(self) -> str:
        """Which of the five was given."""
        return str(self._checked[0])  # type: ignore[attr-defined]

    @property
    def text(self) -> str:
        """What was given, as a text; schemas and choices as JSON."""
        return str(self._checked[1])  # type: ignore[attr-defined]

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams:
        """From an instance or an object of its fields; an unknown name is an error that lists the known ones."""
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"structured_outputs is {shown(value)}; it must be an object with one of {', '.join(KINDS)}",
                param="structured_outputs",
            )
        unknown = sorted(str(name) for name in value if name not in known)
        if unknown:
            raise InvalidRequestError(
                f"structured_outputs has the unknown name {unknown[0][:80]!r}; known are {', '.join(known)}",
                param="structured_outputs",
            )
        return cls(**{name: own for name, own in value.items() if own is not None})
