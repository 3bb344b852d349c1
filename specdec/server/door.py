"""The door: who may come in, with how much, under which name, and the one line that is logged of it.

It knows headers and bytes, and turns away before anything is read that need not be. It never logs
what a request says.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import HTTPError, error_response
from specdec.server.options import ServerOptions

logger = logging.getLogger("specdec.access")

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""Paths without a key: probes, scrapers and the page, which shows nothing by itself."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Door:
    """ASGI middleware: API keys, the size of bodies, request ids, the access log."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._max_body_bytes = options.max_body_bytes
        self._body_timeout_seconds = options.body_timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it at once; note what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        began_at = time.monotonic()
        summary: dict[str, Any] = {
            "id": request_id.decode(), "method": scope["method"], "path": scope["path"], "status": None
        }  # fmt: skip
        scope.setdefault("state", {})["summary"] = summary

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                summary["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._enter(headers, scope, receive, named)
        finally:
            summary["seconds"] = round(time.monotonic() - began_at, 4)
            level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
            logger.log(level, "%s", json.dumps(summary))

    async def _enter(self, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["state"]["key"] = self._check_key(scope["path"], headers)
            _check_encoding(headers.get(b"content-encoding", b"identity"))
            length = headers.get(b"content-length", b"0")
            self._check_size(int(length) if length.isdigit() else 0)
        except HTTPError as error:
            await error_response(error)(scope, receive, send)
            return
        # The answer to HEAD is that to GET; its body is left out where the answer is written.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(inner, self._counted(receive), send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> int | None:
        """Which key was sent; None where none is needed."""
        if not self._keys or path in OPEN_PATHS:
            return None
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]  # all, so that time tells nothing
        if kind.lower() != b"bearer" or not any(matches):
            raise HTTPError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer <key>`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return matches.index(True)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise HTTPError(
                413,
                f"the body is larger than {self._max_body_bytes} bytes, the limit of this server",
                headers={"connection": "close"},  # the rest of the body is not waited for
            )

    def _counted(self, receive: Receive) -> Receive:
        """The same source, cut off at the limits of size (a chunked body names none beforehand) and time."""
        num_bytes, is_whole = 0, False

        async def counted() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # what comes now is the client's leaving, which may take its time
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._body_timeout_seconds or None)
            except asyncio.TimeoutError:
                seconds = self._body_timeout_seconds
                raise HTTPError(408, f"no part of the body came for {seconds:g} s; send it at once") from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            self._check_size(num_bytes)
            return message

        return counted


def _check_encoding(encoding: bytes) -> None:
    if encoding.strip().lower() not in (b"", b"identity"):
        name = encoding[:40].decode("latin-1")
        raise HTTPError(415, f"the header content-encoding is {name!r}; bodies are read as they are, send it unpacked")
