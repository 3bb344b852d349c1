"""The door: who may come in, and with how much; the first thing a request meets.

It knows headers and bytes, and turns away before anything is read that need not be.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import HTTPError, error_response
from specdec.server.options import ServerOptions

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""Paths without a key: probes, scrapers and the page, which shows nothing by itself."""


class Door:
    """ASGI middleware: API keys and the size of bodies."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._max_body_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it at once."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers)
            self._check_size(int(headers.get(b"content-length", b"0")))
        except HTTPError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]  # all, so that time tells nothing
        if kind.lower() != b"bearer" or not any(matches):
            raise HTTPError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer <key>`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise HTTPError(413, f"the body is larger than {self._max_body_bytes} bytes, the limit of this server")

    def _counted(self, receive: Receive) -> Receive:
        """The same source, cut off at the limit: a chunked body names no length beforehand."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check_size(num_bytes)
            return message

        return counted
