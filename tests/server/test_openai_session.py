"""One session of the official client as an application has it: chat, stream, tools, JSON, logprobs, choices.

The toy model says what its weights say; where an answer matters, a recitation gives it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

import specdec
from specdec.server.protocol import read_messages
from specdec.server.tools import in_words, read_tools
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import live_server

ASK: list[Any] = [{"role": "user", "content": "Which weather in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "grey"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}


@contextmanager
def session(engine: Any) -> Iterator[openai.OpenAI]:
    """A client of a server around an engine."""
    with live_server(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


def prompt_of(messages: list[Any], tools: list[Any] | None = None) -> list[int]:
    """What the toy's template makes of a conversation."""
    told = in_words(read_messages(messages), read_tools(tools, None))
    text = "".join(f"<{m['role']}>{m['content']}\n" for m in told) + "<assistant>"
    return [256, *text.encode()]


def test_a_session_with_a_model_that_speculates(toy: str) -> None:
    llm = specdec.LLM(toy, draft="ngram", dtype="float64", num_kv_blocks=512, enable_prefix_caching=False)
    common: dict[str, Any] = {"model": "toy", "messages": ASK, "max_tokens": 16, "seed": 3, "temperature": 0.7}
    with session(llm.engine) as client:
        chat = client.chat.completions.create(**common)
        parts = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == chat.choices[0].message.content
        assert parts[-1].usage.completion_tokens == chat.usage.completion_tokens

        three = client.chat.completions.create(**common, n=3)
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert three.choices[0].message.content == chat.choices[0].message.content
        assert len({choice.message.content for choice in three.choices}) == 3

        judged = client.chat.completions.create(**common, logprobs=True, top_logprobs=2).choices[0]
        assert len(judged.logprobs.content) == chat.usage.completion_tokens
        assert all(len(entry.top_logprobs) == 2 and math.exp(entry.logprob) <= 1 for entry in judged.logprobs.content)

        form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
        common |= {"max_tokens": 200, "response_format": form}
        answer = client.chat.completions.create(**common).choices[0]
        value = json.loads(answer.message.content)
        assert value["sky"] in ("clear", "grey") and value["degrees"] in range(10) and answer.finish_reason == "stop"
        streamed = client.chat.completions.create(**common, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in streamed) == answer.message.content

        with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served here"):
            client.embeddings.create(model="toy", input="a")


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_session_with_tools(num_drafts: int) -> None:
    story = [*prompt_of(ASK, [WEATHER]), *CALL.encode(), EOS]
    with session(scripted_engine(story, num_drafts=num_drafts, max_model_len=4096)) as client:
        asked: dict[str, Any] = {"model": "toy", "messages": ASK, "tools": [WEATHER]}
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"place": "Oslo"})
        with client.chat.completions.stream(**asked) as stream:  # the client's own way of joining deltas
            joined = stream.get_final_completion().choices[0]
        (streamed,) = joined.message.tool_calls
        assert (joined.finish_reason, joined.message.content) == ("tool_calls", "Let me see.")
        assert (streamed.function.name, streamed.function.arguments) == ("weather", call.function.arguments)


def test_the_results_of_a_tool_are_answered() -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    story = [*prompt_of(messages, [WEATHER]), *b"It rains.", EOS]
    with session(scripted_engine(story, max_model_len=4096)) as client:
        reply = client.chat.completions.create(model="toy", messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "It rains." and reply.choices[0].finish_reason == "stop"
