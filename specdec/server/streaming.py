"""Server-sent events: how chunks go over the wire, and how a client's leaving is noticed.

It knows ASGI messages and the event format; what the events say is nothing to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


# Line breaks that only Unicode calls so, and the escapes JSON has for them.
_LINE_BREAKS = {b"\xc2\x85": rb"\u0085", b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029"}


def event(value: Mapping[str, Any]) -> bytes:
    """One event on one line.

    JSON escapes the line breaks of the event format; the three that only Unicode calls so are escaped
    as well, for clients that split text at them. (pydantic's encoder takes a quarter of json's time.)
    """
    data: bytes = to_json(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS.items():
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def watch_client(receive: Receive, on_gone: Callable[[], None]) -> None:
    """Wait until the client leaves, then say so."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


class EventStream(Response):
    """Sends events as they come; a client that leaves ends their source.

    events    ends by itself soon after `close` was called
    close     called exactly when the stream is over, however it ends
    keep_alive_seconds   silence after which a comment is sent, so that proxies do not give up
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        *,
        keep_alive_seconds: float = 15.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._keep_alive_seconds = keep_alive_seconds
        self._num_sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        helpers = [
            asyncio.create_task(watch_client(receive, self._close)),
            asyncio.create_task(self._keep_alive(send)),
        ]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})
            helpers[1].cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
            for helper in helpers:
                helper.cancel()

    async def _keep_alive(self, send: Callable[[Any], Awaitable[None]]) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(self._keep_alive_seconds)
            if self._num_sent == before:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
