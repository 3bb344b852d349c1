"""Structured outputs over HTTP: OpenAI's field, vLLM's fields, refusals by name, compilation beside the loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from specdec.sampling.grammar import GrammarCompiler
from tests.server.scripted import scripted_engine
from tests.server.support import events, run, serving, texts

OBJECT = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": OBJECT}}}, '"a"'),
    ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, '{"a":"'),
    ({"guided_json": OBJECT}, '"a"'),
    ({"guided_json": json.dumps(OBJECT), "guided_whitespace_pattern": "_"}, '"a"'),
    ({"guided_regex": "[xy]{3}"}, ""),
    ({"guided_choice": ["left", "right"]}, ""),
    ({"guided_grammar": 'start: "ab" "cd"'}, "abcd"),
    ({"structured_outputs": {"choice": ["left"]}}, "left"),
]
BAD: list[tuple[str, Any]] = [
    *[("response_format", v) for v in ({"type": "json_schema"}, {"type": "structural_tag"}, {}, 5, "json_object")],
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}),
    *[("structured_outputs", v) for v in ({}, {"yaml": "a"}, {"regex": "("}, {"json": "{"}, 5)],
    *[("guided_json", v) for v in ("{", 5, {"not": {}}, {"$ref": "http://example.invalid/x"})],
    *[("guided_regex", v) for v in ("(", "", 5)],
    *[("guided_choice", v) for v in ([], "a", [1], [""])],
    *[("guided_grammar", v) for v in ("", "start: (", 5)],
]  # fmt: skip


def test_every_form_shapes_the_answer() -> None:
    async def use() -> None:
        async with serving(scripted_engine(num_drafts=3)) as client:
            for fields, part in FORMS:
                answer = (await client.post("/v1/chat/completions", json={**CHAT, **fields})).json()
                choice = answer["choices"][0]
                assert choice["finish_reason"] == "stop" and part in choice["message"]["content"]
                if "json" in str(fields):
                    text = choice["message"]["content"].replace("_", "")
                    assert json.loads(text)["a"] in ("b", "c")
                done = (
                    await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 40, **fields})
                ).json()
                assert done["choices"][0]["finish_reason"] == "stop"
            body = {**CHAT, "response_format": {"type": "json_object"}, "stream": True}
            stream = events((await client.post("/v1/chat/completions", json=body)).text)
            assert texts(stream)[0].startswith("{")

    run(use())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_no_grammar_is_a_400_naming_the_field(path: str) -> None:
    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for name, value in BAD:
                body = {**CHAT, "prompt": "the ", name: value}
                answer = await client.post(path, json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["param"] == name and name in error["message"], (name, value)
            both = {**CHAT, "prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
            assert "both" in (await client.post(path, json=both)).json()["error"]["message"]
            neutral = {**CHAT, "prompt": "the ", "response_format": {"type": "text"}, "guided_regex": None}
            assert (await client.post(path, json=neutral)).status_code == 200

    run(use())


def test_grammars_compile_neither_on_the_loop_nor_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    honest = GrammarCompiler._make

    def noting(self: GrammarCompiler, params: Any) -> Any:
        threads.append(threading.current_thread().name)
        return honest(self, params)

    monkeypatch.setattr(GrammarCompiler, "_make", noting)

    async def use() -> None:
        async with serving(scripted_engine()) as client:
            for _ in range(2):
                await client.post("/v1/completions", json={"prompt": "a", "n": 2, "guided_regex": "[ab]{2}"})

    run(use())
    assert len(threads) == 1 and threads[0].startswith("specdec-grammar")


@pytest.mark.parametrize("stream", [False, True])
def test_a_pattern_that_cannot_be_walked_is_its_senders_fault(stream: bool) -> None:
    """Found only while the output is written: "too many expressions"."""

    async def use() -> None:
        async with serving(scripted_engine(num_drafts=3)) as client:
            body = {"prompt": "x", "max_tokens": 4, "guided_regex": "(x{1000}){1000}", "stream": stream}
            answer = await client.post("/v1/completions", json=body)
            error = (events(answer.text)[-1] if stream else answer.json())["error"]
            assert answer.status_code == (200 if stream else 400) and error["type"] == "invalid_request_error"
            assert error["param"] == "structured_outputs" and "the grammar's limits: " in error["message"]

    run(use())
