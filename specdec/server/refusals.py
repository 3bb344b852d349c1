"""Refusals: what is wrong with a body, as a sentence that names the field, the value and what may stand there.

It knows what the type checker of bodies reports, and none of its words or class names leave this room. What the
sampler has a rule for is told in the sampler's own words, for they name the range too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specdec.errors import InvalidRequestError, shown
from specdec.sampling_params import SamplingParams

B = TypeVar("B", bound=BaseModel)

_RULES = {
    "string_type": "a text",
    "string_unicode": "a text of whole characters",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 4300 digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What the checker's kinds of errors ask for; every kind that bodies can meet (a test sends them all)."""


def read_body(kind: type[B], values: Mapping[str, Any]) -> B:
    """Check names and types; the first thing wrong is the error."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(values, error.errors(include_url=False)[0]) from None


def _refusal(values: Mapping[str, Any], first: Any) -> InvalidRequestError:
    """The error of a body.

    first   what the checker found first: `type`, `loc` and the `input` there
    """
    field, where = str(first["loc"][0]), path_of(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{where} is missing; the request needs it", param=field)
    if first["type"] != "bool_type" and (own := _sampler_refusal(field, values[field])) is not None:
        return own
    rule = _RULES.get(first["type"], "another kind of value; GET /openapi.json tells which")
    param = ".".join(part for part in first["loc"] if isinstance(part, str))
    return InvalidRequestError(f"{where} is {shown(first['input'])}; it must be {rule}", param=param)


def _sampler_refusal(field: str, value: Any) -> InvalidRequestError | None:
    """What the sampler says of a value; None where it has no rule or no objection."""
    if field in SamplingParams.__dataclass_fields__:
        try:
            SamplingParams(**{field: value})
        except InvalidRequestError as error:
            return error
    return None


def path_of(parts: tuple[str | int, ...] | list[str | int]) -> str:
    """A place in a body, as programs write it.

    >>> path_of(("messages", 0, "role"))
    'messages[0].role'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


@contextmanager
def speaking_of(name: str, own: str) -> Iterator[None]:
    """Let errors about the parameter `own` speak of the field `name` that the client used for it."""
    try:
        yield
    except InvalidRequestError as error:
        if name != own and own in str(error):
            error.args = (str(error).replace(own, name),)
            error.param = name if error.param == own else error.param
        raise
