"""The official client over a real socket, sync and async, against a toy model and a recitation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

import specdec
from specdec.server.options import ServerOptions
from tests.server.scripted import scripted_engine
from tests.server.support import live_server

KEY = "sesame"
MESSAGES = [{"role": "user", "content": "abc abc abc"}]


@pytest.fixture(scope="module")
def llm(toy: str) -> specdec.LLM:
    """A toy model that speculates by n-grams, for offline use: the reference."""
    return specdec.LLM(toy, draft="ngram", dtype="float64", num_kv_blocks=512)


@pytest.fixture(scope="module")
def address(llm: specdec.LLM, toy: str) -> Iterator[str]:
    """The same model behind a socket."""
    served = specdec.LLM(toy, draft="ngram", dtype="float64", num_kv_blocks=512, enable_prefix_caching=False)
    with live_server(served.engine, ServerOptions(api_keys=(KEY,))) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    """A client with the key."""
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as made:
        yield made


def test_a_completion_says_what_generate_says(client: openai.OpenAI, llm: specdec.LLM) -> None:
    params = specdec.SamplingParams(temperature=0.8, seed=5, max_tokens=24, n=2)
    expected = [output.text for output in llm.generate("abc abc abc", params)[0].outputs]
    reply = client.completions.create(model="toy", prompt="abc abc abc", temperature=0.8, seed=5, max_tokens=24, n=2)
    assert [choice.text for choice in reply.choices] == expected
    assert reply.usage is not None and reply.usage.completion_tokens <= 48


@pytest.mark.parametrize("extra", [{}, {"speculative": {"enabled": False}}])
def test_a_chat_says_what_chat_says_streamed_or_not(client: openai.OpenAI, llm: specdec.LLM, extra: dict) -> None:
    expected = llm.chat(MESSAGES, specdec.SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    options = {"model": "toy", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "extra_body": extra}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == expected.text
    stream = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected.text


def test_the_async_client_streams_many_at_once(address: str, client: openai.OpenAI) -> None:
    options = {"model": "toy", "prompt": "xyz", "max_tokens": 12, "temperature": 0}
    expected = client.completions.create(**options).choices[0].text  # type: ignore[call-overload]

    async def read(asynchronous: openai.AsyncOpenAI) -> str:
        stream = await asynchronous.completions.create(**options, stream=True)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def use() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY) as asynchronous:
            return await asyncio.gather(*(read(asynchronous) for _ in range(8)))

    assert asyncio.run(use()) == [expected] * 8


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="toy", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="toy", input="a")
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=address, api_key="wrong") as stranger:
        stranger.models.list()


def test_leaving_a_stream_frees_its_place() -> None:
    engine = scripted_engine(seconds=0.002, max_num_seqs=2)
    with live_server(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        for _ in range(6):
            with client.completions.create(model="toy", prompt="the ", max_tokens=500, stream=True) as stream:
                next(iter(stream))
        reply = client.completions.create(model="toy", prompt="the ", max_tokens=5)
        assert reply.choices[0].text == "quick"


def test_a_client_that_does_not_stream_may_leave_too() -> None:
    engine = scripted_engine(seconds=0.005)
    with (
        live_server(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=0.1) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.completions.create(model="toy", prompt="the ", max_tokens=500)
    assert engine.num_steps < 200
