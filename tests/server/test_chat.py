"""/v1/chat/completions: messages to a prompt, the role once, one reason a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec.engine import Engine
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import events, run, serving, texts

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "<user>hello\n<assistant>"  # what the toy's template makes of it, behind BOS


def story(answer: str) -> list[int]:
    """A story whose answer begins where the prompt of HELLO ends."""
    return [256, *PROMPT.encode(), *answer.encode(), EOS]


def post(engine: Engine, **body: Any) -> Any:
    """Status and JSON of one chat; of a stream, its chunks."""

    async def use() -> Any:
        async with serving(engine) as client:
            answer = await client.post("/v1/chat/completions", json=body)
            stream = body.get("stream") and answer.status_code == 200
            return answer.status_code, events(answer.text) if stream else answer.json()

    return run(use())


def test_a_chat_answers_until_the_end_of_the_text() -> None:
    status, reply = post(scripted_engine(story("Hi there!")), messages=HELLO)
    assert status == 200 and reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hi there!", "refusal": None}
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == len(PROMPT) + 1  # one BOS


def test_an_answer_may_be_as_long_as_fits() -> None:
    _, reply = post(scripted_engine(max_model_len=64), messages=HELLO)
    assert reply["usage"]["total_tokens"] == 64 and reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(name: str) -> None:
    _, reply = post(scripted_engine(story("Hi there!")), messages=HELLO, **{name: 2})
    assert reply["choices"][0]["message"]["content"] == "Hi"


def test_the_role_comes_first_and_once_for_every_choice() -> None:
    _, chunks = post(scripted_engine(story("Hi!"), num_drafts=2), messages=HELLO, stream=True, n=2)
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
    assert texts(chunks) == {0: "Hi!", 1: "Hi!"}


def test_one_step_is_one_chunk() -> None:
    _, chunks = post(scripted_engine(story("abcdefghij"), num_drafts=4), messages=HELLO, stream=True)
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "a", "bcdef", "ghij", None]


@pytest.mark.parametrize("options, expected", [(None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)])
def test_usage_ends_a_stream_only_when_asked(options: Any, expected: int) -> None:
    _, chunks = post(scripted_engine(story("Hi!")), messages=HELLO, stream=True, stream_options=options)
    assert sum(chunk["choices"] == [] for chunk in chunks) == expected
    if expected:
        assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_usage_in_chunks_is_null_until_the_end_or_grows_when_asked() -> None:
    def completions(**options: bool) -> list[Any]:
        body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True} | options}
        _, chunks = post(scripted_engine(story("Hi!")), **body)
        return [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert completions() == [None] * 5 + [4]
    assert completions(continuous_usage_stats=True) == [0, 1, 2, 3, 4, 4]


def test_token_ids_come_when_asked_one_list_a_step() -> None:
    body = {"messages": HELLO, "return_token_ids": True}
    _, reply = post(scripted_engine(story("Hi!"), num_drafts=2), **body)
    assert reply["choices"][0]["token_ids"] == [*b"Hi!", EOS]
    _, chunks = post(scripted_engine(story("Hi!"), num_drafts=2), **body, stream=True)
    assert [c["choices"][0].get("token_ids") for c in chunks] == [None, [ord("H")], [*b"i!", EOS], None]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    _, reply = post(scripted_engine(story("Hi!")), messages=[{"role": "user", "content": parts}])
    assert reply["choices"][0]["message"]["content"] == "Hi!"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": 5, "content": "a"}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_other_messages_are_refused_by_name(messages: Any) -> None:
    status, reply = post(scripted_engine(), messages=messages)
    assert status == 400 and reply["error"]["param"] == "messages", reply


@pytest.mark.parametrize("make", [lambda text: text, lambda text: [{"type": "text", "text": text}]])
def test_a_prompt_over_the_context_is_the_clients_error(make: Callable[[str], Any]) -> None:
    messages = [{"role": "user", "content": make("word " * 1000)}]
    status, reply = post(scripted_engine(max_model_len=128), messages=messages)
    assert status == 400
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["code"] == "context_length_exceeded" and reply["error"]["param"] == "messages"
