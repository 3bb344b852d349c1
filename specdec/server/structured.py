"""What a body says of the output's shape, under OpenAI's name and vLLM's, as one value.

It knows the fields and their shapes; whether a grammar compiles is the engine's business. An error names the
field the client used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specdec.errors import InvalidRequestError
from specdec.structured_outputs import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS = ("structured_outputs", "response_format", *_GUIDED)
"""Everything that shapes an output; a body gives one of them at most."""

_SPACES = {"structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
_OWN_WORDS = {name: {f"structured_outputs.{inner}": name, **_SPACES} for name, inner in _GUIDED.items()}
_OWN_WORDS["response_format"] = {"structured_outputs.json": "response_format.json_schema.schema", **_SPACES}
_OWN_WORDS["tools"] = {"structured_outputs.json": "tools: the schema of their arguments"}


def shape_field(fields: Mapping[str, Any]) -> str | None:
    """The field that shapes the output; raises InvalidRequestError where two do."""
    given = [name for name in FIELDS if fields.get(name) is not None and fields[name] != {"type": "text"}]
    if len(given) > 1:
        raise InvalidRequestError(f"{given[0]} and {given[1]} are both given; one of them must go", param=given[1])
    return given[0] if given else None


def read_shape(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What the output must match; None where the body does not say."""
    name = shape_field(fields)
    if name is None:
        return None
    spaces = fields.get("guided_whitespace_pattern")
    with naming(name):
        if name == "structured_outputs":
            return StructuredOutputsParams.of(fields[name])
        if name == "response_format":
            return replace(_read_format(fields[name]), whitespace_pattern=spaces)
        return StructuredOutputsParams(**{_GUIDED[name]: fields[name]}, whitespace_pattern=spaces)


@contextmanager
def naming(name: str | None) -> Iterator[None]:
    """Let errors about structured outputs speak of the client's own field."""
    try:
        yield
    except InvalidRequestError as error:
        if name is None or name == error.param or error.param != "structured_outputs":
            raise
        message = str(error)
        for inner, own in _OWN_WORDS.get(name, {}).items():
            message = message.replace(inner, own)
        raise InvalidRequestError(message if name in message else f"{name}: {message}", param=name) from None


def _read_format(value: object) -> StructuredOutputsParams:
    """OpenAI's response_format; its type "text" never comes here."""
    rule = "response_format must be an object whose type is text, json_object or json_schema"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"response_format is {repr(value)[:80]}; {rule}", param="response_format")
    kind = value.get("type")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise InvalidRequestError(f"response_format has the type {repr(kind)[:80]}; {rule}", param="response_format")
    inner = value.get("json_schema")
    schema = inner.get("schema", inner.get("json_schema")) if isinstance(inner, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(
            f"response_format.json_schema.schema is {repr(schema)[:80]}; it must be a JSON schema",
            param="response_format",
        )
    return StructuredOutputsParams(json=schema)
