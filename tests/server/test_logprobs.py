"""Log-probabilities and echo: one entry a token in both shapes, streamed or not, real bytes, aligned offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest

import specdec
from specdec.engine import Engine
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import events, run, serving, texts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "<user>hello\n<assistant>"


def post(engine: Engine, path: str, **body: Any) -> Any:
    """The JSON of one request that must succeed; of a stream, its chunks."""

    async def use() -> Any:
        async with serving(engine) as client:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return events(answer.text) if body.get("stream") else answer.json()

    return run(use())


@pytest.fixture(scope="module")
def llm(toy: str) -> specdec.LLM:
    """A real toy model: the reference and the served one."""
    return specdec.LLM(toy, draft="ngram", dtype="float64", num_kv_blocks=256)


BODY: dict[str, Any] = {"prompt": "abc abc abc", "max_tokens": 12, "temperature": 0, "logprobs": 3}


def test_a_completion_reports_what_generate_reports(llm: specdec.LLM) -> None:
    params = specdec.SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    expected = llm.generate("abc abc abc", params)[0].outputs[0].logprobs
    assert expected is not None
    got = post(llm.engine, COMPLETIONS, **BODY)["choices"][0]["logprobs"]
    assert got["token_logprobs"] == pytest.approx([entry.logprob for entry in expected], abs=1e-9)
    assert all(3 <= len(top) <= 4 for top in got["top_logprobs"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("drafts", [0, 3])
def test_streams_report_the_same_with_and_without_drafts(path: str, drafts: int) -> None:
    body: dict[str, Any] = {"max_tokens": 9, "stop": ["zz"]}
    body |= {"prompt": "the ", "logprobs": 2} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2
    }  # fmt: skip
    plain = post(scripted_engine(), path, **body)["choices"][0]["logprobs"]
    chunks = post(scripted_engine(num_drafts=drafts), path, **body, stream=True)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name, whole in plain.items():
        if whole is not None:
            assert [item for part in parts for item in part[name]] == whole


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 5}])
def test_an_echoed_prompt_is_scored_from_its_second_token_on(llm: specdec.LLM, fields: dict[str, Any]) -> None:
    prompt = "abc abc abc, " * 10  # ten blocks and more: the second time they are cached
    body = BODY | {"prompt": prompt, "echo": True} | fields
    for _ in range(2):
        choice = post(llm.engine, COMPLETIONS, **body)["choices"][0]
        logprobs, count = choice["logprobs"], len(prompt) + fields["max_tokens"]
        assert choice["text"].startswith(prompt)
        assert [len(logprobs[name]) for name in logprobs] == [count] * 4
        assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"][: len(prompt)] == list(range(len(prompt)))
    expected = llm.generate(prompt, specdec.SamplingParams(max_tokens=1, prompt_logprobs=3))[0].prompt_logprobs
    assert expected is not None
    values = [entry.logprob for entry in expected if entry is not None]
    assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_any_output(stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "the quick", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    reply = post(scripted_engine(), COMPLETIONS, **body)
    choice = reply[0]["choices"][0] if stream else reply["choices"][0]
    assert choice["text"] == "the quick" and len(choice["logprobs"]["token_logprobs"]) == 9
    usage = reply[-1]["usage"] if stream else reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 0)


def test_echo_alone_puts_the_prompt_before_the_text() -> None:
    body: dict[str, Any] = {"prompt": ["the ", "the quick "], "n": 2, "max_tokens": 5, "echo": True}
    reply = post(scripted_engine(), COMPLETIONS, **body)
    assert [c["text"] for c in reply["choices"]] == ["the quick"] * 2 + ["the quick brown"] * 2
    assert reply["usage"]["completion_tokens"] == 20
    assert texts(post(scripted_engine(), COMPLETIONS, **body, stream=True))[3] == "the quick brown"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["\U0001f600!", "\u4f60\u597d", "e\u0301"])
def test_bytes_of_half_characters_are_their_own(text: str, stream: bool) -> None:
    story = [256, *PROMPT.encode(), *text.encode(), EOS]
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "stream": stream}
    reply = post(scripted_engine(story, num_drafts=2), CHAT, **body)
    choices = [chunk["choices"][0] for chunk in reply] if stream else reply["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == text
    assert entries[-1]["token"] == "<eos>"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_not_finite_is_still_json(path: str, llm: specdec.LLM) -> None:
    extreme = {"temperature": 0.01, "top_p": 0.3, "allowed_token_ids": [65, 66], "max_tokens": 4}
    asked = {"prompt": "a", "logprobs": 5} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5
    }  # fmt: skip
    choice = post(llm.engine, path, **extreme, **asked)["choices"][0]["logprobs"]
    values = choice["token_logprobs"] if path == COMPLETIONS else [entry["logprob"] for entry in choice["content"]]
    assert len(values) == 4 and all(math.isfinite(value) for value in values)
