"""Streams: characters whole, stop strings never shown, silence bridged, slow readers alone with their slowness."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from specdec.engine import Engine
from specdec.server.options import ServerOptions
from specdec.server.streaming import event
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import events, live_server, run, serving, texts, wait_for

FLAG = "\U0001f3f3\ufe0f\u200d\U0001f308"


def both(engine_of: Any, **body: Any) -> tuple[str, list[dict[str, Any]], str | None]:
    """Whole text, chunks and reason of the same request, streamed and not; both must say the same."""

    async def use(engine: Engine, stream: bool) -> Any:
        async with serving(engine) as client:
            answer = await client.post("/v1/completions", json=body | {"stream": stream})
            assert answer.status_code == 200, answer.text
            return events(answer.text) if stream else answer.json()["choices"][0]

    whole, chunks = run(use(engine_of(), False)), run(use(engine_of(), True))
    assert texts(chunks).get(0, "") == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    return whole["text"], chunks, whole["finish_reason"]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("text", ["a\U0001f600b", "\u4f60\u597d", "e\u0301", FLAG, "\U0001f600" * 3, "\u00e9 \u00e9"])
def test_characters_whose_bytes_span_tokens_stay_whole(text: str, num_drafts: int) -> None:
    story = [*b"> ", *text.encode(), EOS]
    got, chunks, reason = both(lambda: scripted_engine(story, num_drafts=num_drafts), prompt="> ", max_tokens=99)
    assert got == text and reason == "stop"
    assert all("\ufffd" not in choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("text", ["a\x85b\u2028c\u2029d", "a\nb\r\nc\x0bd\x0ce\x1cf"])
def test_line_breaks_inside_a_text_do_not_break_events(text: str) -> None:
    story = [*b"> ", *text.encode(), EOS]
    _, chunks, _ = both(lambda: scripted_engine(story, num_drafts=9), prompt="> ", max_tokens=99)
    for chunk in chunks:
        assert len(event(chunk).decode().splitlines()) == 2  # the event and the empty line behind it


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_half_a_character_is_replaced_and_hurts_nothing_behind_it(num_drafts: int) -> None:
    story = [*b"> ", *"\U0001f600".encode()[:2], *b" a", EOS]
    got, _, _ = both(lambda: scripted_engine(story, num_drafts=num_drafts), prompt="> ", max_tokens=99)
    assert got.replace("\ufffd", "") == " a" and "\ufffd" in got


def test_a_character_cut_by_the_limit_ends_as_a_replacement() -> None:
    story = [*b"> ", *"a\U0001f600".encode(), EOS]
    got, _, reason = both(lambda: scripted_engine(story), prompt="> ", max_tokens=3)
    assert got.startswith("a") and set(got[1:]) == {"\ufffd"} and reason == "length"


STORY = "the quick brown fox jumps over the lazy dog. " * 8


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 8])
@pytest.mark.parametrize(
    "stop, expected",
    [
        ("fox jumps", "quick brown "),
        (["zzz", "ox j", "ow"], "quick br"),
        (["own", "brown f"], "quick br"),
        ("q", ""),
        (["br", "quick bro"], "quick "),
    ],
)
def test_text_ends_exactly_before_the_first_stop_string(stop: Any, expected: str, num_drafts: int) -> None:
    got, _, reason = both(
        lambda: scripted_engine(STORY, num_drafts=num_drafts), prompt="the ", max_tokens=99, stop=stop
    )
    assert (got, reason) == (expected, "stop")


def test_what_only_might_be_a_stop_string_is_shown_in_the_end() -> None:
    got, _, reason = both(lambda: scripted_engine(STORY), prompt="the ", max_tokens=13, stop="fox hunts")
    assert (got, reason) == ("quick brown f", "length")


def test_text_and_end_are_separate_chunks() -> None:
    _, chunks, _ = both(lambda: scripted_engine(STORY, num_drafts=4), prompt="the ", max_tokens=5)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("q", None), ("uick", None), ("", "length")]


def test_all_chunks_of_a_stream_share_head_and_id() -> None:
    _, chunks, _ = both(lambda: scripted_engine(STORY), prompt="the ", max_tokens=5)
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1


def test_silence_is_bridged_with_comments() -> None:
    async def use() -> str:
        options = ServerOptions(keep_alive_seconds=0.02)
        async with serving(scripted_engine(seconds=0.1), options) as client:
            return (await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 2, "stream": True})).text

    text = run(use())
    assert 3 <= text.count(": keep-alive\n\n") <= 12
    assert texts(events(text)) == {0: "qu"}


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def use() -> None:
        async with serving(scripted_engine(seconds=0.01), ServerOptions(request_timeout_seconds=0.1)) as client:
            body = {"prompt": "the ", "max_tokens": 400}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
            lines = (await client.post("/v1/completions", json=body | {"stream": True})).text.strip().split("\n\n")
            assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
            assert (await client.post("/v1/completions", json=body | {"max_tokens": 1})).status_code == 200

    run(use())


def _open_stream(url: str, max_tokens: int) -> socket.socket:
    """A raw connection that has asked for a stream and read nothing yet."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(_post({"prompt": "the ", "max_tokens": max_tokens, "stream": True}))
    return connection


def _post(fields: dict[str, Any]) -> bytes:
    """The bytes of a completion's request."""
    body = json.dumps(fields).encode()
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_body_that_never_ends_is_given_up_and_one_cut_short_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted_engine()
    with live_server(engine, ServerOptions(body_timeout_seconds=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        with (
            socket.create_connection((host, int(port))) as half_open,
            socket.create_connection((host, int(port))) as cut,
        ):
            half_open.sendall(head)
            cut.sendall(head)
            cut.close()
            assert b" 408 " in half_open.recv(1000)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "the "}).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_readers_who_do_not_read_slow_nobody_down() -> None:
    engine = scripted_engine(seconds=0.001, max_num_seqs=8, max_model_len=100_000, num_blocks=50_000)
    with live_server(engine) as url:
        idle = [_open_stream(url, 20_000) for _ in range(3)]
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the ", "max_tokens": 100})
        assert answer.json()["usage"]["completion_tokens"] == 100
        assert time.monotonic() - began < 3
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_clients_who_vanish_leave_nothing_behind(stream: bool) -> None:
    """In the queue, in the prompt, in decoding: all within the first moments of 60 requests."""
    engine = scripted_engine(seconds=0.002, max_num_seqs=4, num_drafts=2)
    rng = random.Random(1)

    async def visit(client: httpx.AsyncClient) -> bool:
        body = {"prompt": "the quick " * 20, "max_tokens": 300, "stream": stream}
        try:
            await asyncio.wait_for(client.post("/v1/completions", json=body), rng.uniform(0.005, 0.3))
        except asyncio.TimeoutError:
            return True
        return False

    with live_server(engine) as url:

        async def use() -> int:
            async with httpx.AsyncClient(
                base_url=url, limits=httpx.Limits(max_connections=None), timeout=None
            ) as client:
                left = await asyncio.gather(*(visit(client) for _ in range(60)))
                answer = await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 5})
                assert answer.json()["choices"][0]["text"] == "quick"
                return sum(left)

        assert run(use()) > 40


def test_two_hundred_streams_at_once_are_all_served() -> None:
    engine = scripted_engine(max_num_seqs=64, num_drafts=3, wrong_every=2)
    body = json.dumps({"prompt": "the ", "max_tokens": 12, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    async def read(port: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 200 ") and answer.count("data: [DONE]") == 1
        lines = [line for line in answer.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    with live_server(engine) as url:

        async def use() -> list[str]:
            return await asyncio.gather(*(read(int(url.rpartition(":")[2])) for _ in range(200)))

        assert set(run(use())) == {STORY[4:16]}


def test_readers_of_a_byte_at_a_time_slow_nobody_down() -> None:
    engine = scripted_engine(seconds=0.001, max_num_seqs=8, max_model_len=100_000, num_blocks=50_000)
    with live_server(engine) as url:
        slow = [_open_stream(url, 20_000) for _ in range(4)]
        is_over = threading.Event()

        def sip() -> None:
            while not is_over.wait(0.05):
                for connection in slow:
                    connection.recv(1)

        thread = threading.Thread(target=sip, daemon=True)
        thread.start()
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the ", "max_tokens": 100})
        assert answer.json()["choices"][0]["text"] == STORY[4:104]
        is_over.set()
        thread.join()
        for connection in slow:
            connection.close()


KILLED = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.stdin.buffer.read())
connection.recv(1)
print("reading", flush=True)
while True:
    connection.recv(1)
"""


def test_a_client_that_is_killed_frees_its_place_and_nobody_notices() -> None:
    engine = scripted_engine(seconds=0.002, max_num_seqs=1, max_model_len=100_000, num_blocks=50_000)
    with live_server(engine) as url:
        port = url.rpartition(":")[2]
        words = [sys.executable, "-S", "-c", KILLED, port]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(_post({"prompt": "the ", "max_tokens": 90_000, "stream": True}))
            client.stdin.close()
            assert client.stdout.readline() == b"reading\n"
            client.kill()
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the ", "max_tokens": 5}, timeout=20)
        assert answer.json()["choices"][0]["text"] == "quick"  # the one place was free again
    assert engine.num_steps < 5000


def test_a_client_that_closes_its_sending_half_is_taken_for_gone() -> None:
    """uvicorn's rule, which the README tells: the place is freed, and the stream ends without its last event."""
    engine = scripted_engine(seconds=0.002, max_model_len=100_000, num_blocks=50_000)
    with live_server(engine) as url, _open_stream(url, 90_000) as connection:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(20)
        received = b""
        while data := connection.recv(65536):
            received += data
        assert b"[DONE]" not in received
        wait_for(lambda: not engine.has_work)
