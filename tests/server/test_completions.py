"""/v1/completions: text as the engine says it, usage that adds up, choices in order."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from specdec.engine import Engine
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import events, run, serving, texts


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    """One completion."""
    return await client.post("/v1/completions", json=body)


def ask(engine: Engine | None = None, **body: Any) -> Any:
    """The JSON of one completion that must succeed; of a stream, its chunks."""

    async def use() -> Any:
        async with serving(engine or scripted_engine()) as client:
            answer = await post(client, **body)
            assert answer.status_code == 200, answer.text
            return events(answer.text) if body.get("stream") else answer.json()

    return run(use())


def test_a_completion_has_text_reason_and_usage() -> None:
    reply = ask(model="toy", prompt="the ", max_tokens=11)
    assert reply["object"] == "text_completion" and reply["model"] == "toy"
    choice = {"index": 0, "text": "quick brown", "logprobs": None, "finish_reason": "length"}
    assert reply["choices"] == [choice]
    assert {k: reply["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 4, "completion_tokens": 11, "total_tokens": 15
    }  # fmt: skip


def test_completions_stop_after_16_tokens_by_default() -> None:
    assert ask(prompt="the ")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["the ", list(b"the ")])
def test_texts_and_ids_mean_the_same(prompt: Any) -> None:
    assert ask(prompt=prompt, max_tokens=5)["choices"][0]["text"] == "quick"


@pytest.mark.parametrize(
    "prompts", [["the ", "the quick ", "the q"], [list(b"the "), list(b"the quick "), list(b"the q")]]
)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_ordered_by_prompt_then_n(prompts: Any, stream: bool) -> None:
    reply = ask(
        prompt=prompts, n=2, max_tokens=5, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    got = texts(reply) if stream else {c["index"]: c["text"] for c in reply["choices"]}
    assert got == {0: "quick", 1: "quick", 2: "brown", 3: "brown", 4: "uick ", 5: "uick "}
    counted = reply[-1]["usage"] if stream else reply["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (19, 30)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_stream_says_what_the_whole_reply_says(num_drafts: int) -> None:
    body: dict[str, Any] = {"prompt": "the ", "max_tokens": 40, "stop": ["lazy d"]}
    whole = ask(scripted_engine(num_drafts=num_drafts), **body)
    chunks = ask(scripted_engine(num_drafts=num_drafts), **body, stream=True)
    assert texts(chunks)[0] == whole["choices"][0]["text"] == "quick brown fox jumps over the "
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_the_end_of_the_text_ends_with_stop() -> None:
    engine = scripted_engine([*b"the quick", EOS])
    chunks = ask(engine, prompt="the ", max_tokens=40, stream=True)
    assert texts(chunks)[0] == "quick" and chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_speculative_metrics_come_when_asked() -> None:
    body = {"prompt": "the ", "max_tokens": 11}
    assert "metrics" not in ask(scripted_engine(num_drafts=4), **body)
    reply = ask(scripted_engine(num_drafts=4), **body, return_speculative_metrics=True)
    assert reply["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 11 / 3,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 2],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 8,
        "num_draft_tokens": 8,
    }


@pytest.mark.parametrize("own, most", [({"enabled": False}, 1), ({"num_speculative_tokens": 2}, 3), ({}, 5), (None, 5)])
def test_a_request_has_its_own_say_over_speculation(own: Any, most: int) -> None:
    chunks = ask(scripted_engine(num_drafts=4), prompt="the ", max_tokens=12, stream=True, speculative=own)
    assert max(len(c["choices"][0]["text"]) for c in chunks) == most


def test_token_sources_come_when_asked() -> None:
    engine = scripted_engine(num_drafts=3, wrong_every=3)
    tokens = ask(engine, prompt="the ", max_tokens=11, return_token_sources=True)["choices"][0]["tokens"]
    assert "".join(t["text"] for t in tokens) == "quick brown"
    assert [t["source"] for t in tokens[:7]] == ["plain", "draft", "draft", "recovered", "draft", "draft", "recovered"]


def test_prefix_hits_are_told() -> None:
    engine = scripted_engine()
    prompt = "the quick brown fox jumps over the lazy dog. the "

    async def use() -> Any:
        async with serving(engine) as client:
            await post(client, prompt=prompt)
            return (await post(client, prompt=prompt)).json()

    assert run(use())["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_more_tokens_than_the_model_has_room_for_are_refused_with_the_numbers() -> None:
    """Prompt and output share the length: one token more is a 400; without a limit a chat takes what is left."""
    chat = {"messages": [{"role": "user", "content": "hello"}]}

    async def use() -> None:
        async with serving(scripted_engine(max_model_len=64)) as client:
            num_prompt = (await client.post("/tokenize", json=chat)).json()["count"]
            for path, body, name, room in (
                ("/v1/completions", {"prompt": [1] * 50}, "max_tokens", 14),
                ("/v1/chat/completions", chat, "max_tokens", 64 - num_prompt),
                ("/v1/chat/completions", chat, "max_completion_tokens", 64 - num_prompt),
            ):
                answer = await client.post(path, json=body | {name: room + 1, "stream": True})
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
                assert error["param"] == name and f"{name} is {room + 1}" in error["message"]
                assert f"has {64 - room} tokens" in error["message"] and "is 64 tokens" in error["message"]
                whole = await client.post(path, json=body | {name: room, "ignore_eos": True})
                assert whole.json()["usage"]["total_tokens"] == 64
            rest = await client.post("/v1/chat/completions", json=chat | {"ignore_eos": True})
            assert rest.json()["usage"]["total_tokens"] == 64

    run(use())
