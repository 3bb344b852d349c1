"""Bodies nobody would send: whatever they hold, the answer is a 200 or a 4xx in OpenAI's shape, soon.

A sample runs always; the large grid with `pytest -m slow tests/server/test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from specdec.server.protocol import ChatBody, CompletionBody
from tests.server.scripted import scripted_engine
from tests.server.support import live_server, run, serving

ROOTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": ({"prompt": "the ", "max_tokens": 3}, CompletionBody),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, ChatBody),
    "/tokenize": ({"prompt": "a"}, CompletionBody),
    "/detokenize": ({"tokens": [1, 2]}, CompletionBody),
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63), 10**400, float("nan"),
    float("inf"), "", "a", "0.5", "\ud800", "\x00", "\u202e", "e\u0301" * 50, "x" * 5000, [], {}, [[]], [None], [{}],
    [0], [-1], ["a"], [2**70], [1.5], {"a": 1}, {"": None}, {"type": "text"}, {"role": "user", "content": "x"},
    [[1], [2]], ["a", "b"],
]  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Something of any type, sometimes nested."""
    if depth < 3 and rng.random() < 0.25:
        inner = [odd_value(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return inner if rng.random() < 0.5 else {rng.choice(["type", "text", "role", "enabled", "x"]): v for v in inner}
    return rng.choice(ODD)


def odd_body(rng: random.Random, root: dict[str, Any], fields: list[str]) -> bytes:
    """An ordinary body with a few odd values, at times with bytes broken."""
    body = dict(root)
    for _ in range(rng.randint(1, 4)):
        body[rng.choice([*fields, *root, "flux"])] = odd_value(rng)
    raw = bytearray(json.dumps(body).encode())
    while rng.random() < 0.2:
        at = rng.randrange(len(raw))
        raw[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(raw)


async def fuzz(client: httpx.AsyncClient, seed: int, count: int) -> dict[int, int]:
    """Send odd bodies; return how often each status came."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    for _ in range(count):
        path = rng.choice(list(ROOTS))
        root, kind = ROOTS[path]
        raw = odd_body(rng, root, list(kind.model_fields))
        answer = await asyncio.wait_for(client.post(path, content=raw), 5)
        assert answer.status_code in (200, 400, 404), (answer.status_code, path, raw)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], raw
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    ordinary = await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 5})
    assert ordinary.json()["choices"][0]["text"] == "quick"
    return statuses


def test_odd_bodies_are_answered_properly() -> None:
    async def use() -> dict[int, int]:
        async with serving(scripted_engine(max_model_len=64)) as client:
            return await fuzz(client, seed=1, count=400)

    statuses = run(use())
    assert statuses[400] > 150 and statuses[200] > 20  # both sides of the door were tried


@pytest.mark.slow
def test_five_thousand_odd_bodies_are_answered_properly() -> None:
    async def use() -> None:
        async with serving(scripted_engine(max_model_len=64)) as client:
            await fuzz(client, seed=2, count=5000)

    asyncio.run(use())


@pytest.mark.slow
def test_a_minute_of_streams_that_come_and_go_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted_engine(seconds=0.001, max_num_seqs=64, num_drafts=3, wrong_every=4)
    rng = random.Random(3)

    async def visit(client: httpx.AsyncClient, end: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            body = {"prompt": "the ", "max_tokens": rng.randint(1, 200), "stream": True, "return_token_ids": True}
            leaves_after = rng.randint(1, 20) if rng.random() < 1 / 3 else 10**9
            ids: list[int] = []
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        ids += json.loads(line[6:])["choices"][0].get("token_ids", [])
                        leaves_after -= 1
                    if leaves_after <= 0:
                        break
            expected = [engine.target.next_token(3 + i) for i in range(len(ids))]  # type: ignore[attr-defined]
            assert ids == expected and (leaves_after <= 0 or len(ids) == body["max_tokens"])

    with live_server(engine) as url:

        async def use() -> None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
                end = asyncio.get_running_loop().time() + 60
                await asyncio.gather(*(visit(client, end) for _ in range(200)))

        asyncio.run(use())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
