"""Running it: queue limits, draining, ids, logs, probes, tokenising, CORS."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from specdec.async_engine import AsyncEngine
from specdec.server.app import create_app
from specdec.server.options import ServerOptions
from tests.server.scripted import scripted_engine
from tests.server.support import run, serving

BODY = {"prompt": "the ", "max_tokens": 5}


def app_of(client: httpx.AsyncClient) -> FastAPI:
    """The app behind an in-process client."""
    app: FastAPI = client._transport.app  # type: ignore[attr-defined]
    return app


def test_a_full_queue_says_when_to_come_back() -> None:
    async def use() -> None:
        async with serving(scripted_engine(seconds=0.02, max_num_seqs=1), ServerOptions(max_waiting=2)) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(6)))
            refused = [answer for answer in answers if answer.status_code == 429]
            assert len(refused) == 3 and all(answer.headers["retry-after"] == "1" for answer in refused)
            assert refused[0].json()["error"]["code"] == "queue_full"
            assert all(answer.status_code in (200, 429) for answer in answers)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            never = await client.post("/v1/completions", json=BODY | {"n": 4})
            assert never.status_code == 400 and never.json()["error"]["param"] == "n"

    run(use())


def test_a_key_has_a_limit_of_its_own() -> None:
    async def use() -> None:
        options = ServerOptions(api_keys=("a", "b"), max_requests_per_key=2)
        async with serving(scripted_engine(seconds=0.02), options) as client:

            async def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await client.post("/v1/completions", json=BODY, headers=headers)).status_code

            for _ in range(2):  # places come back
                statuses = await asyncio.gather(*(ask(key) for key in "aaaabb"))
                assert sorted(statuses[:4]) == [200, 200, 429, 429] and statuses[4:] == [200, 200]

    run(use())


def test_prompts_are_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def use() -> None:
        async with serving(scripted_engine(), ServerOptions(log_prompts=True)) as client:
            await client.post("/v1/completions", json=BODY | {"n": 2})

    run(use())
    (line,) = (record.getMessage() for record in caplog.records if record.name == "specdec.access")
    assert json.loads(line)["prompts"] == ["the "]


def test_while_draining_new_requests_are_refused_and_running_ones_end() -> None:
    async def use() -> None:
        async with serving(scripted_engine(seconds=0.01)) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 20}))
            await asyncio.sleep(0.05)
            app_of(client).state.serving.admission.is_draining = True
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            assert (await running).json()["usage"]["completion_tokens"] == 20

    run(use())


def test_every_answer_has_a_request_id_and_keeps_a_sane_one() -> None:
    async def use() -> None:
        async with serving(scripted_engine(), ServerOptions(api_keys=("k",))) as client:
            first, second = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
            assert first != second
            for status, path, key in ((200, "/v1/models", "k"), (401, "/v1/models", "no"), (404, "/nowhere", "k")):
                headers = {"authorization": f"Bearer {key}", "x-request-id": "mine-7"}
                answer = await client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-7")
            answer = await client.get("/health", headers={"x-request-id": "a b;c"})
            assert answer.headers["x-request-id"] != "a b;c"

    run(use())


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_a_request_without_its_text(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO)

    async def use() -> None:
        async with serving(scripted_engine(num_drafts=2)) as client:
            await client.post("/v1/completions", json=BODY | {"stream": stream})
            await client.post("/v1/completions", json=BODY | {"n": -1})

    run(use())
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "specdec.access"]
    assert [line["status"] for line in lines] == [200, 400]
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"], lines[0]["finish_reasons"]) == (4, 5, ["length"])
    assert lines[0]["first_token_seconds"] <= lines[0]["seconds"]
    everything = " ".join(record.getMessage() for record in caplog.records)
    assert "quick" not in everything and "the " not in everything.replace("the request", "")


def test_texts_become_tokens_and_tokens_texts() -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            made = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
            assert made["tokens"] == [104, 0xC3, 0xA9] and made["count"] == 3 and len(made["token_strs"]) == 3
            chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
            assert chat["tokens"][0] == 256 and chat["tokens"].count(256) == 1
            back = (await client.post("/detokenize", json={"tokens": made["tokens"]})).json()
            assert back == {"prompt": "hé"}
            for path, body in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": 5}),
                ("/tokenize", {"prompt": "a", "messages": []}),
                ("/detokenize", {}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": [260]}),
                ("/detokenize", {"tokens": ["a"]}),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400 and answer.json()["error"]["param"], answer.text

    run(use())


def test_long_texts_are_tokenised_beside_the_event_loop() -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            made = await client.post("/tokenize", json={"prompt": "ab" * 20_000})
            assert made.json()["count"] == 40_000

    run(use())


def test_other_origins_may_call_only_when_told_so() -> None:
    async def use(origins: tuple[str, ...]) -> Any:
        async with serving(scripted_engine(), ServerOptions(cors_origins=origins, api_keys=("k",))) as client:
            headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
            return (await client.options("/v1/completions", headers=headers)).headers

    assert "access-control-allow-origin" not in run(use(()))
    assert run(use(("http://a.example",)))["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in run(use(("http://b.example",)))


def test_version_and_openapi_are_served() -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            assert (await client.get("/version")).json()["version"]
            document = (await client.get("/openapi.json")).json()
            body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
            assert "messages" in body["schema"]["properties"] and "$ref" not in json.dumps(body)

    run(use())


def test_the_lifespan_ends_the_thread() -> None:
    async def use() -> None:
        async_engine = AsyncEngine(scripted_engine())
        app = create_app(async_engine, "toy")
        async with app.router.lifespan_context(app):
            assert async_engine.is_alive
        assert not async_engine.is_alive

    run(use())
