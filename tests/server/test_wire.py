"""Bytes on a socket that no HTTP library would send, and some that one does: answers, limits, neighbours."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.server.wire import MAX_HEAD_BYTES
from tests.server.scripted import scripted_engine
from tests.server.support import live_server

BODY = b'{"prompt": "the ", "max_tokens": 5}'
STREAM = b'{"prompt": "the ", "max_tokens": 5, "stream": true}'


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server listens."""
    with live_server(scripted_engine()) as url:
        yield int(url.rpartition(":")[2])


def post(body: bytes, *headers: bytes, closes: bool = True) -> bytes:
    """A completion request as bytes."""
    own = (b"host: x", b"content-length: %d" % len(body), *((b"connection: close",) if closes else ()))
    return b"POST /v1/completions HTTP/1.1\r\n" + b"\r\n".join((*own, *headers)) + b"\r\n\r\n" + body


def talk(port: int, *parts: bytes) -> bytes:
    """Send parts, each in a packet of its own, and read to the end."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:  # the server has refused and closed before all was sent
            pass
    return received


def text_of(answer: bytes) -> str:
    """The text of a whole completion."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def error_of(answer: bytes, status: int) -> str:
    """The message of a refusal in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return str(error["message"])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 20,
        b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-request-id: a\x01b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_every_error(port: int, raw: bytes) -> None:
    assert "no valid HTTP/1.1" in error_of(talk(port, raw), 400)
    assert text_of(talk(port, post(BODY))) == "quick"


@pytest.mark.parametrize("name", [b"x-%d", b"x", b""])
def test_a_head_without_end_is_cut_off_at_the_limit(port: int, name: bytes) -> None:
    """Many headers, one long header, a long path: none is gathered for ever."""
    many = [b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(2000)] if name == b"x-%d" else [b"a" * 1000] * 2000
    start = b"GET /health HTTP/1.1\r\nhost: x\r\n" + (b"x: " if name == b"x" else b"")
    answer = talk(port, start if name else b"GET /", *many)
    assert not answer or b"larger than %d bytes" % MAX_HEAD_BYTES in answer or b"400" in answer
    assert b" 200 " not in answer


def test_a_head_below_the_limit_is_read_and_so_are_bodies_of_any_cut(port: int) -> None:
    long = post(BODY, b"cookie: " + b"a" * (MAX_HEAD_BYTES - 1000))
    assert text_of(talk(port, long)) == "quick"
    spaces = b" " * 300_000
    assert text_of(talk(port, *(post(BODY + spaces)[i : i + 50_000] for i in range(0, 350_000, 50_000)))) == "quick"
    request = post(BODY)
    assert text_of(talk(port, *(request[i : i + 1] for i in range(len(request))))) == "quick"
    many = talk(port, *(post(BODY + spaces, closes=False) for _ in range(3)), post(BODY))
    assert many.count(b'"quick"') == 4  # what a head may hold is counted for every request anew


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offer_to_speak_another_protocol_is_passed_over(port: int, protocol: bytes) -> None:
    """Java's HTTP client and `curl --http2` make one with every request; its body still counts."""
    offer = (b"Connection: Upgrade, close", b"Upgrade: " + protocol, b"HTTP2-Settings: AAMAAABkAAQAAP__")
    assert text_of(talk(port, post(BODY, *offer, closes=False))) == "quick"


def test_requests_sent_at_once_are_answered_in_turn(port: int) -> None:
    streams = talk(port, post(STREAM, closes=False) + post(BODY, closes=False) + post(STREAM))
    assert streams.count(b"HTTP/1.1 200") == 3 and streams.count(b"data: [DONE]") == 2 and b'"quick"' in streams


def test_bodies_that_are_packed_are_refused_and_marked_ones_read(port: int) -> None:
    assert "'gzip'" in error_of(talk(port, post(gzip.compress(BODY), b"content-encoding: gzip")), 415)
    assert text_of(talk(port, post(BODY, b"content-encoding: identity"))) == "quick"
    assert text_of(talk(port, post(b"\xef\xbb\xbf" + BODY))) == "quick"  # a byte order mark


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/v1/models", "/metrics"])
def test_head_is_answered_like_get_without_a_body(port: int, path: str) -> None:
    answer = talk(port, f"HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n") and b"content-length: " in answer


@pytest.mark.parametrize("value", [b"\xff\xfe", b"a b", b"a,b", b"x" * 129, b"", b"\xc3\xa9", b"../../x", b"{}"])
def test_odd_request_ids_are_replaced(port: int, value: bytes) -> None:
    answer = talk(port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: " + value + b"\r\n\r\n")
    (line,) = (line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: "))
    assert len(line) == len(b"x-request-id: ") + 32 and value not in (line[14:],)


def test_who_never_finishes_a_head_is_sent_away_and_who_waits_for_an_answer_is_not(monkeypatch: Any) -> None:
    """Sockets that say nothing, or half of something, do not pile up; a long answer and its successor are as ever."""
    monkeypatch.setattr("specdec.server.wire.HEAD_SECONDS", 0.3)
    with live_server(scripted_engine(seconds=0.01)) as url:
        port = int(url.rpartition(":")[2])
        for start in (b"", b"G", b"GET /health HTTP/1.1\r\nhost:"):
            assert "not whole" in error_of(talk(port, start), 408)
        slow = BODY.replace(b"5", b"100")  # a second
        assert talk(port, post(slow, closes=False) + post(BODY)).count(b"HTTP/1.1 200") == 2
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(post(STREAM.replace(b"5", b"100"), closes=False))
            received = connection.recv(65536)
            connection.sendall(b"GET /he")  # the next request begins while this one is answered
            while data := connection.recv(65536):
                received += data
        stream, error = received.split(b"HTTP/1.1 408")
        assert stream.count(b'"text"') == 101 and stream.endswith(b"0\r\n\r\n") and b"not whole" in error
