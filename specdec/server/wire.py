"""The wire: what is decided of HTTP/1.1 before an app sees a request.

It knows bytes and heads of requests: a head has a limit of size and of time, an offer to speak another protocol is
passed over (as HTTP allows; taken up, it would cost the body), and what is no HTTP is told so in the shape of every
other error.
"""

from __future__ import annotations

import asyncio
import http
import json
import re
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec.server.errors import HTTPError, error_body

MAX_HEAD_BYTES = 64 * 2**10
"""Of request line and headers; one read more may pass. Without a limit a head of any size is gathered in memory."""

HEAD_SECONDS = 60.0
"""From the start of a connection, or the first byte of a later request, to the end of its head."""

_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class Wire(HttpToolsProtocol):
    """uvicorn's protocol, one a connection."""

    _is_in_head = True
    _num_head_bytes = 0
    _num_messages = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there, who should soon say what they want."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """They are gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came; end the connection where a head does not end."""
        was_in_head, num_messages = self._is_in_head, self._num_messages
        if was_in_head and not self._num_head_bytes:
            data = _without_upgrade(data)
        super().data_received(data)
        if was_in_head and self._is_in_head and num_messages == self._num_messages:
            self._await_head()
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes; send less")

    def on_headers_complete(self) -> None:
        """What follows is the body."""
        self._stop_waiting()
        self._is_in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is another request."""
        self._is_in_head = True
        self._num_messages += 1
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, "this is no valid HTTP/1.1 request; see the request line, the headers and the body's length")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """The head of a request that comes while another is answered may take as long as that."""
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()
        elif not self.transport.is_closing():
            self._refuse(408, f"the head of the request was not whole after {HEAD_SECONDS:g} s; send it at once")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(error_body(HTTPError(status, message))).encode()
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if not self._is_answering:  # nobody could tell an error in the middle of an answer from the answer
            self.transport.write(head.encode() + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The same start of a request without its Upgrade header.

    >>> _without_upgrade(b"GET / HTTP/1.1\\r\\nUpgrade: h2c\\r\\nHost: x\\r\\n\\r\\n")
    b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest if b"pgrade:" in head.lower() else data


def wire_config(app: Any, host: str, port: int, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration of a server of ours; its own logging is off, for the door writes the access log."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Wire,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        **options,
    )
