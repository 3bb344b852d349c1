"""A client that costs little: sends request bodies at once, keeps the bytes that come, and the times.

    python -m evals.http_client HOST PORT < REQUESTS

REQUESTS is a JSON list of (path, body). It runs in a process of its own, so that it takes no time of the server's
interpreter, looks for bytes every few milliseconds instead of being woken by each chunk (waking it is paid by the
process that sends, and takes far longer than sending), and reads what it got only when all is over. Times are late by
one look at most, which counts against the server. It knows sockets and server-sent events.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

SECONDS_BETWEEN_LOOKS = 0.002
SILENCE_SECONDS = 300.0
"""Without a byte on any connection for this long, the server is taken for dead."""


class Reader:
    """One connection and what came over it; it is done when the server has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.parts: list[bytes] = []
        self.first_at = self.ended_at = 0.0

    def send(self, content: bytes) -> None:
        """Send a request whole; from then on nothing waits."""
        self.socket.sendall(content)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Keep what came; False when it was the end."""
        data = self.socket.recv(2**18)
        if not data:
            return False
        self.ended_at = time.monotonic()
        self.first_at = self.first_at or self.ended_at
        self.parts.append(data)
        return True


def request(path: str, body: dict[str, Any]) -> bytes:
    """One POST, after which the connection is closed."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_answer(raw: bytes) -> tuple[str, int]:
    """The text of a stream and how many chunks carried some.

    >>> read_answer(b'HTTP/1.1 200 OK\\r\\n\\r\\n5\\r\\ndata: {"choices":[{"text":"a"}]}\\n\\n')
    ('a', 1)
    """
    if not raw.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the server answered {raw[:300]!r}")
    pieces = []
    for line in raw.decode().split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                pieces.append(choice["delta"].get("content") if "delta" in choice else choice.get("text"))
    texts = [piece for piece in pieces if piece]
    return "".join(texts), len(texts)


def wait_for_all(readers: Sequence[Reader]) -> None:
    """Read every connection to its end."""
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
        last_at = time.monotonic()
        while selector.get_map():
            found = selector.select(0)
            for key, _ in found:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
            last_at = time.monotonic() if found else last_at
            if time.monotonic() - last_at > SILENCE_SECONDS:
                raise RuntimeError(f"no byte came for {SILENCE_SECONDS:g} s")
            time.sleep(SECONDS_BETWEEN_LOOKS)


def send_all(host: str, port: int, requests: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Open every connection, then send everything, then wait for the last byte."""
    raw = [request(path, body) for path, body in requests]
    readers = [Reader(host, port) for _ in raw]
    began = time.monotonic()
    for reader, content in zip(readers, raw, strict=True):
        reader.send(content)
    wait_for_all(readers)
    seconds = max(reader.ended_at for reader in readers) - began
    answers = [read_answer(b"".join(reader.parts)) for reader in readers]
    return {
        "seconds": seconds,
        "first": [reader.first_at - began for reader in readers],
        "texts": [text for text, _ in answers],
        "num_chunks": sum(count for _, count in answers),
    }


if __name__ == "__main__":
    print(json.dumps(send_all(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin))))
