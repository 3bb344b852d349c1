"""What a 400 says: the field, the value and what may stand there, in our words, whatever any field holds."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from specdec.errors import InvalidRequestError
from specdec.server.body import MAX_SEARCHED, parse_object
from specdec.server.protocol import ROLES, ChatBody, CompletionBody, read_messages, read_prompts
from specdec.server.refusals import read_body
from specdec.server.text_routes import DetokenizeBody, TokenizeBody

ORDINARY: dict[type[BaseModel], str] = {
    CompletionBody: '"prompt": "the "',
    ChatBody: '"messages": [{"role": "user", "content": "hello"}]',
    TokenizeBody: '"prompt": "the "',
    DetokenizeBody: '"tokens": [1]',
}
VALUES = [
    "null", "true", "0", "-1", "1.5", "1e300", "123456789012345678901234567890", "9" * 5000, '"x"', '""', "[]", "{}",
    "[[1]]", "[null]", "[{}]", '{"a": 1}', '{"1": null}', '{"1": 1000}', '{"type": 5}', '{"type": "json_schema"}',
    "NaN", "-Infinity", "1e999", "[1, NaN]", '{"a": {"b": [1e999]}}', '[1, "a"]', "[-1]", '{"enabled": 1}',
    '{"include_usage": 1}', '{"num_speculative_tokens": -1}', '{"num_speculative_tokens": "x"}', '"\\ud800"',
    '{"num_speculative_tokens": 1000000}', '[{"type": "function"}]', '[{"role": "user"}]', '"' + "y" * 3000 + '"',
]  # fmt: skip
FIELDS = [(kind, name) for kind in ORDINARY for name in kind.model_fields]
LEAKS = re.compile(
    r"Speculative\b|StreamOptions|[a-z]Body|pydantic|instance of|dictionary|[Ii]nput should|_type\b|NoneType"
    r"|set_int_max|Traceback|structured_outputs\.|Params\b|<class|object at 0x"
)
REMEDIES = re.compile("must|not supported|needs|known|only|send|compile|nothing")


def refusal(kind: type[BaseModel], raw: bytes) -> InvalidRequestError | None:
    """What the way in says of a body; None where it lets it through."""
    try:
        body = read_body(kind, parse_object(raw))
        if isinstance(body, (CompletionBody, ChatBody)):
            body.sampling_params()
        if isinstance(body, CompletionBody):
            read_prompts(body.prompt)
        if isinstance(body, ChatBody):
            read_messages(body.messages)
            body.read_tools()
    except InvalidRequestError as error:
        return error
    return None


def with_field(kind: type[BaseModel], name: str, value: str) -> bytes:
    """An ordinary body with one field set; what that field needs beside it is there."""
    root = "" if f'"{name}"' in ORDINARY[kind] else ORDINARY[kind] + ", "
    beside = {"stream_options": '"stream": true, ', "top_logprobs": '"logprobs": true, '}.get(name, "")
    return f'{{{root}{beside}"{name}": {value}}}'.encode()


@pytest.mark.parametrize("kind, name", FIELDS, ids=[f"{kind.__name__}-{name}" for kind, name in FIELDS])
def test_every_wrong_value_of_every_field_is_told_in_a_sentence_with_its_name(kind: type[BaseModel], name: str) -> None:
    errors = [error for value in VALUES if (error := refusal(kind, with_field(kind, name, value))) is not None]
    assert len(errors) >= 9 or name in ("prompt", "messages")  # numbers that are none, and halves of characters
    for error in errors:
        message = str(error)
        assert name in message and (error.param or "").split(".")[0].split("[")[0] == name, (message, error.param)
        leak = LEAKS.search(message)
        assert leak is None or name == "structured_outputs", message
        assert len(message) < 600 and REMEDIES.search(message), message


@pytest.mark.parametrize(
    "kind, fields, words",
    [
        (CompletionBody, '"speculative": 3', ["speculative is 3", "object", "enabled", "num_speculative_tokens"]),
        (ChatBody, '"speculative": {"enabled": 1}', ["speculative.enabled is 1", "true or false"]),
        (ChatBody, '"logit_bias": {"17": "x"}', ["logit_bias", "'x'", "token id 17", "-100 to 100"]),
        (ChatBody, '"logit_bias": {"17": 101}', ["101", "token id 17", "-100 to 100"]),
        (ChatBody, '"logit_bias": {"dog": 1}', ["'dog'", "token ids", "integers from 0"]),
        (ChatBody, '"max_completion_tokens": 0', ["max_completion_tokens is 0", "from 1 to"]),
        (ChatBody, '"max_completion_tokens": 2, "min_tokens": 3', ["min_tokens is 3", "max_completion_tokens"]),
        (CompletionBody, '"n": "x"', ["n is 'x'", "an integer from 1 to 128"]),
        (CompletionBody, '"guided_regex": 5', ["guided_regex is 5"]),
        (CompletionBody, '"guided_json": 5', ["guided_json is 5"]),
        (CompletionBody, '"temperature": NaN', ["temperature is NaN", "finite"]),
        (CompletionBody, '"logit_bias": {"1": -Infinity}', ["logit_bias.1 is -Infinity", "finite"]),
        (CompletionBody, '"x": [{"y": 1e999}]', ["x[0].y is 1e999", "finite"]),
        (CompletionBody, f'"seed": {"9" * 5000}', ["seed is 999", "5000 characters", "1000 digits"]),
        (CompletionBody, '"user": "\\ud800"', ["user holds an unpaired surrogate"]),
        (CompletionBody, '"\\ud800": 1', ["the name of a field holds an unpaired surrogate"]),
        (DetokenizeBody, '"tokens": [1, "a"]', ["tokens[1] is 'a'", "an integer"]),
    ],
)  # fmt: skip
def test_what_it_says(kind: type[BaseModel], fields: str, words: list[str]) -> None:
    error = refusal(kind, f"{{{ORDINARY[kind]}, {fields}}}".encode())
    assert error is not None
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("role", ["wizard", "", "User", "function", "user ", 5, None, [], {"a": 1}])
def test_a_role_that_nobody_has_is_refused_with_those_there_are(role: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "a"}]
    for kind in (ChatBody, TokenizeBody):
        body = kind.model_validate({"messages": messages})
        with pytest.raises(InvalidRequestError) as caught:
            read_messages(body.messages)
        assert caught.value.param == "messages"
        assert f"messages[1].role is {role!r}" in str(caught.value)
        assert all(name in str(caught.value) for name in ROLES)


def test_every_role_there_is_is_taken() -> None:
    assert len(read_messages([{"role": role, "content": "a"} for role in ROLES])) == len(ROLES)


def test_a_wrong_number_far_behind_is_refused_without_its_place() -> None:
    near, far = [0] * 1000, [0] * (MAX_SEARCHED + 1)
    for zeros, says in ((near, "prompt[1000] is NaN"), (far, "the body holds a number that is not finite")):
        with pytest.raises(InvalidRequestError) as caught:
            parse_object(json.dumps({"prompt": [*zeros, float("nan")]}).encode())
        assert says in str(caught.value)
