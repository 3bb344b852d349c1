"""Fifty JSON schemas to generate by: nested, arrays, enums, numbers, escapes, optional fields.

They know nothing of models. Texts and lists are bounded, so that an output has an end that any model can reach.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """A closed object with required and optional fields, in this order."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: Schema, low: int = 1, high: int = 3) -> Schema:
    """A list of bounded length."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def text(most: int = 10) -> Schema:
    """A short text."""
    return {"type": "string", "maxLength": most}


def one_of(*values: object) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def whole(low: int = 0, high: int = 999) -> Schema:
    """A bounded whole number."""
    return {"type": "integer", "minimum": low, "maximum": high}


BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ISO_DATE: Schema = {"type": "string", "pattern": r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"}
PERSON = record({"name": text(), "age": whole(0, 130)})
POINT = record({"x": whole(-99, 99), "y": whole(-99, 99)})
ZIP: Schema = {"type": "string", "pattern": "^[0-9]{5}$"}
ITEM = record({"sku": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{2}$"}, "qty": whole(1, 9)})
WEATHER = record({"city": text(8), "unit": one_of("C", "F")})
TREE: Schema = {
    "$defs": {"leaf": record({"v": whole(0, 9)}), "pair": record({"left": {"$ref": "#/$defs/leaf"}}, {"n": text(4)})},
    "$ref": "#/$defs/pair",
}  # fmt: skip

SCHEMAS: dict[str, Schema] = {
    "one text": record({"title": text()}),
    "two fields": PERSON,
    "flag": record({"is_open": BOOL}),
    "null": record({"nothing": NULL}),
    "constant": record({"version": {"const": 3}, "kind": {"const": "point"}}),
    "enum of texts": record({"color": one_of("red", "green", "blue")}),
    "enum of kinds": record({"value": one_of(1, "one", None, True)}),
    "enum with a shared start": record({"state": one_of("start", "started", "starting", "stop")}),
    "long enum": record({"month": one_of("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug")}),
    "small whole": record({"count": whole(0, 9)}),
    "negative whole": record({"offset": whole(-50, -10)}),
    "wide whole": record({"id": whole(100000, 999999)}),
    "multiple": record({"price": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}}),
    "number": record({"ratio": {"type": "number", "minimum": 0, "maximum": 1}}),
    "open number": record({"size": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1000}}),
    "exact length": record({"code": {"type": "string", "minLength": 4, "maxLength": 4}}),
    "pattern": record({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}),
    "date by pattern": record({"day": ISO_DATE}),
    "date by format": record({"day": {"type": "string", "format": "date"}}),
    "uuid": record({"key": {"type": "string", "format": "uuid"}}),
    "list of texts": record({"tags": many(text(6))}),
    "list of numbers": record({"scores": many(whole(0, 9), 2, 4)}),
    "list of enums": record({"dice": many(one_of(1, 2, 3, 4, 5, 6), 5, 5)}),
    "empty list": record({"rest": many(text(4), 0, 0)}),
    "list of lists": record({"grid": many(many(whole(0, 1), 2, 2), 2, 2)}),
    "list of records": record({"points": many(POINT, 1, 2)}),
    "top level list": many(one_of("a", "b"), 2, 2),
    "top level enum": one_of("yes", "no", "maybe"),
    "top level whole": whole(10, 99),
    "tuple": {"type": "array", "prefixItems": [text(4), whole(0, 9)], "items": False, "minItems": 2},
    "nested once": record({"owner": PERSON}),
    "nested twice": record({"shop": record({"owner": PERSON, "is_open": BOOL})}),
    "nested four times": record({"a": record({"b": record({"c": record({"d": one_of("deep")})})})}),
    "record in list in record": record({"team": record({"members": many(PERSON, 1, 2), "lead": text(6)})}),
    "optional": record({"name": text(6)}, {"nick": text(6)}),
    "only optional": record({}, {"a": whole(0, 9), "b": BOOL, "c": NULL}),
    "many optional": record({"id": whole(0, 99)}, {"size": one_of("s", "m", "l"), "gift": BOOL, "note": text(5)}),
    "optional nested": record({"name": text(5)}, {"address": record({"zip": ZIP})}),
    "quotes in keys": record({'say "it"': BOOL, "back\\slash": BOOL}),
    "line ends in values": record({"text": one_of("one\ntwo", "tab\there", 'a "quote"')}),
    "unicode keys": record({"größe": whole(0, 9), "名前": text(4)}),
    "unicode values": record({"city": one_of("Zürich", "São Paulo", "東京", "🙂")}),
    "slashes": record({"path": one_of("/usr/bin", "C:\\temp")}),
    "nullable": record({"middle": {"type": ["string", "null"], "maxLength": 5}}),
    "any of": record({"value": {"anyOf": [whole(0, 9), text(4), NULL]}}),
    "any of records": {"anyOf": [record({"cat": one_of("meow")}), record({"dog": one_of("woof")})]},
    "references": TREE,
    "order": record({"items": many(ITEM, 1, 2), "paid": BOOL}),
    "tool call": record({"name": {"const": "get_weather"}, "arguments": WEATHER}),
    "verdict": record({"answer": one_of("A", "B", "C", "D"), "confidence": whole(0, 100), "why": many(text(8))}),
}  # fmt: skip
