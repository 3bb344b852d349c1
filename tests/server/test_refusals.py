"""Bad requests: always 400 in OpenAI's shape, naming the field; never 422, never 500; the engine goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from specdec.server.options import ServerOptions
from tests.server.scripted import scripted_engine
from tests.server.support import run, serving

ENDPOINTS = {
    "/v1/completions": '"prompt": "the "',
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "hello"}]',
}
BAD_FIELDS = [
    *[("temperature", v) for v in ("NaN", "Infinity", "-Infinity", "1e999", "-1", '"0.5"', "true", "[]", "1e5")],
    *[("top_p", v) for v in ("0", "1.1", "-0.1", '"1"')],
    *[("top_k", v) for v in ("-2", "1.5", str(2**63), '"1"', "9" * 5000)],
    *[("n", v) for v in ("0", "-1", "1.5", "1000", "true")],
    *[("seed", v) for v in ("1.5", str(2**64), '"1"')],
    *[("max_tokens", v) for v in ("0", "-1", "1.5", '"1"')],
    *[("stop", v) for v in ('""', '[""]', '["", "x"]', "5", "[5]", '{"a": 1}')],
    *[("stop_token_ids", v) for v in ("[-1]", "[1.5]", "[true]", "5", '["a"]')],
    *[("allowed_token_ids", v) for v in ("[-1]", "[999]", "[]")],
    *[("logit_bias", v) for v in ('{"a": 1}', '{"1": "x"}', '{"-1": 1}', "[]")],
    *[("presence_penalty", v) for v in ("NaN", '"1"', "2.5")],
    *[("min_p", v) for v in ("NaN", "-1", "2")],
    ("logprobs", "-1"),
    ("stream", '"yes"'),
    ("stream_options", "{}"),
    ("speculative", '{"depth": 1}'),
    ("speculative", "5"),
    ("model", "5"),
    ("response_format", '{"type": "video"}'),
]
BAD_BODIES = [
    b"", b"  ", b'{"model":"m", x}', b"[]", b"null", b"5", b'"a"', b"\xff\xfe{", b'{"prompt": "a\xff"}', b"[" * 100000,
    b'{"a":' * 100000, b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}', b"{}",
    b'{"prompt": null, "messages": null}', b'{"prompt": [[1e999]]}', b"\x00", b"{" * 10,
]  # fmt: skip


async def still_works(client: httpx.AsyncClient) -> None:
    """An ordinary request is answered as ever."""
    answer = await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == "quick"


def check_refusal(answer: httpx.Response, *, status: int = 400) -> dict[str, Any]:
    """OpenAI's error shape with a sentence in it."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10
    assert len(error["message"]) < 1000
    return error


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_known_field_with_a_bad_value_is_refused_by_name(path: str) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for name, value in BAD_FIELDS:
                body = f'{{{ENDPOINTS[path]}, "{name}": {value}}}'.encode()
                error = check_refusal(await client.post(path, content=body))
                in_json = value in ("NaN", "Infinity", "-Infinity", "1e999") or len(value) > 1000
                assert (error["param"] or "").startswith(name) or in_json, (name, value, error)
            await still_works(client)

    run(use())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_no_json_object_is_refused(path: str) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for body in BAD_BODIES:
                check_refusal(await client.post(path, content=body))
            await still_works(client)

    run(use())


def test_prompts_that_are_no_prompts_are_refused() -> None:
    bad: list[Any] = ["", [], [[]], [""], [-1], [260], [2**40], [1.5], [True], [None], {}, 5]
    bad += [["a", 1], [[1], "a"], [[-1]], [[1, "a"]]]

    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for prompt in bad:
                answer = await client.post("/v1/completions", json={"prompt": prompt})
                assert check_refusal(answer)["param"] == "prompt", prompt
            await still_works(client)

    run(use())


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0}, {"top_k": -1}, {"top_k": 9999999}, {"top_k": 2**63 - 1}, {"temperature": 0},
        {"temperature": 1e-7},
        {"temperature": 0.01, "top_p": 0.3}, {"stop": []}, {"stop": None}, {"temperature": None}, {"n": None},
        {"presence_penalty": 0}, {"logit_bias": {}}, {"user": "me", "metadata": {}, "store": False}, {"best_of": 1},
        {"echo": False, "suffix": None, "logprobs": None}, {"temperature": 1},
        {"stream_options": None}, {"model": None},
    ],
)  # fmt: skip
def test_neutral_and_extreme_values_are_served(fields: dict[str, Any]) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            answer = await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 5} | fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "quick"

    run(use())


def test_what_is_not_built_is_refused_not_ignored() -> None:
    chat = [{"functions": [{"name": "f"}]}, {"top_logprobs": 2}, {"audio": {}}]
    completion: list[dict[str, Any]] = [{"suffix": "x"}]
    completion += [{"best_of": 3}, {"prompt_logprobs": 1}]

    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for path, cases in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
                for fields in cases:
                    body = json.loads(f"{{{ENDPOINTS[path]}}}") | fields
                    assert check_refusal(await client.post(path, json=body))["param"] == next(iter(fields))

    run(use())


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", json={"prompt": "the ", "flux": 1, "cap": [2]})
                assert answer.status_code == 200

    run(use())
    assert sorted(r.args[0] for r in caplog.records if "unknown" in r.msg) == ["cap", "flux"]  # type: ignore[index]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_unknown_key_of_speculative_is_named_with_the_known_ones(path: str) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            body = json.loads(f"{{{ENDPOINTS[path]}}}") | {"speculative": {"enabled": True, "num_drafts": 4}}
            error = check_refusal(await client.post(path, json=body))
            assert error["param"] == "speculative"
            for name in ("num_drafts", "enabled", "num_speculative_tokens"):
                assert name in error["message"]

    run(use())


def test_another_model_is_not_found() -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            answer = await client.post("/v1/completions", json={"prompt": "the ", "model": "gpt-9"})
            assert check_refusal(answer, status=404)["code"] == "model_not_found"
            check_refusal(await client.get("/v1/models/gpt-9"), status=404)
            assert (await client.get("/v1/models/toy")).json()["id"] == "toy"
            assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["toy"]

    run(use())


def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            check_refusal(await client.post("/v1/embeddings", json={}), status=404)
            check_refusal(await client.get("/v1/completions"), status=405)

    run(use())


def test_without_the_key_nothing_is_served_but_probes() -> None:
    async def use() -> None:
        async with serving(scripted_engine(), ServerOptions(api_keys=("one", "two"))) as client:
            for value in ("", "Bearer no", "Bearer", "one", "Basic one"):
                header = {"authorization": value} if value else {}
                check_refusal(await client.get("/v1/models", headers=header), status=401)
                check_refusal(await client.post("/v1/completions", json={}, headers=header), status=401)
            for key in ("one", "two"):
                assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
            assert (await client.get("/health")).status_code == 200

    run(use())


def test_a_body_over_the_limit_is_refused() -> None:
    async def use() -> None:
        async with serving(scripted_engine(), ServerOptions(max_body_bytes=1000)) as client:
            answer = await client.post("/v1/completions", content=b" " * 1001)
            check_refusal(answer, status=413)
            assert answer.headers["connection"] == "close"  # what is left of the body is not the next request

            async def parts() -> Any:
                for _ in range(20):
                    yield b" " * 100

            check_refusal(await client.post("/v1/completions", content=parts()), status=413)
            await still_works(client)

    run(use())


def test_a_dead_engine_answers_503_and_lets_nobody_wait() -> None:
    """From the moment the first client can know of it, however long the engine's thread takes to end."""
    engine = scripted_engine()

    async def use() -> None:
        async with serving(engine) as client:
            assert (await client.get("/health")).status_code == 200
            engine.target.before = lambda: 1 / 0  # type: ignore[attr-defined]
            dawdle(client._transport.app.state.serving.engine)  # type: ignore[attr-defined]
            for _ in range(2):
                error = check_refusal(await client.post("/v1/completions", json={"prompt": "the "}), status=500)
                assert error["type"] == "server_error"
            check_refusal(await client.get("/health"), status=503)
            check_refusal(await client.post("/v1/completions", json={"prompt": "the "}), status=503)

    run(use())


def dawdle(async_engine: Any) -> None:
    """Let the engine's thread rest a while whenever it has told what a step did."""
    deliver = async_engine._deliver

    def slowly(*args: Any) -> None:
        deliver(*args)
        time.sleep(0.2)

    async_engine._deliver = slowly


def test_a_fault_in_mid_stream_is_an_error_event() -> None:
    engine = scripted_engine()
    engine.target.poison = {7}  # type: ignore[attr-defined]

    async def use() -> None:
        async with serving(engine) as client:
            answer = await client.post("/v1/completions", json={"prompt": "the ", "stream": True})
            lines = answer.text.strip().split("\n\n")
            assert answer.status_code == 200 and len(lines) == 6 and lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
            other = await client.post("/v1/completions", json={"prompt": "the quick b", "max_tokens": 4})
            assert other.json()["choices"][0]["text"] == "rown"

    run(use())
