"""A client that costs little: sends request bodies at once, keeps the bytes that come, and the times.

    python -m evals.http_client HOST PORT < REQUESTS

REQUESTS is a JSON list of (path, body). It runs in a process of its own, so that it takes no time of the server's
interpreter, and reads what it got only when all is over. It knows sockets and server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any


class Reader(asyncio.Protocol):
    """One connection; `done` is set when the server has closed it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.first_at = self.ended_at = 0.0
        self.done = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.ended_at = time.monotonic()
        self.first_at = self.first_at or self.ended_at
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The answer is whole."""
        self.done.set()


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


async def send_all(host: str, port: int, requests: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Open every connection, then send everything, then wait for the last byte."""
    loop = asyncio.get_running_loop()
    raw = [request(path, body) for path, body in requests]
    connections = [await loop.create_connection(Reader, host, port) for _ in raw]
    began = time.monotonic()
    for (transport, _), content in zip(connections, raw, strict=True):
        transport.write(content)
    readers = [reader for _, reader in connections]
    for reader in readers:
        await reader.done.wait()
    seconds = max(reader.ended_at for reader in readers) - began
    answers = [read_answer(b"".join(reader.parts)) for reader in readers]
    return {
        "seconds": seconds,
        "first": [reader.first_at - began for reader in readers],
        "texts": [text for text, _ in answers],
        "num_chunks": sum(count for _, count in answers),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(send_all(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
