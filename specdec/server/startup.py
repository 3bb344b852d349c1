"""Startup: an app that answers while the model loads, and then steps aside.

It knows that loading takes a while and may fail; what is loaded, it is told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from specdec.server.errors import HTTPError, error_response

if TYPE_CHECKING:
    from specdec.server.serving import Serving

logger = logging.getLogger("specdec.server")


class LoadingApp:
    """ASGI: /health is fine and everything else 503 until the real app is there.

    load      makes the app; it runs on a thread of its own, which the end of the process does not wait for
    on_end    called on the event loop when loading has succeeded or failed
    error     why loading failed; is_loading: the thread is at work
    """

    def __init__(self, load: Callable[[], FastAPI], on_end: Callable[[], None] = lambda: None) -> None:
        self.on_end = on_end
        self.error: BaseException | None = None
        self.is_loading = False
        self._load = load
        self._app: FastAPI | None = None
        self._lifespan: AbstractAsyncContextManager[Any] | None = None

    @property
    def serving(self) -> Serving | None:
        """What the loaded app serves; None while it loads."""
        return self._app.state.serving if self._app is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the real app answer."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            await JSONResponse({"status": "loading"})(scope, receive, send)
        elif scope["type"] == "http":
            error = HTTPError(503, "the model is still loading", code="loading", headers={"retry-after": "5"})
            await error_response(error)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        loop = asyncio.get_running_loop()
        self.is_loading = True
        threading.Thread(target=self._work, args=(loop,), name="specdec-load", daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
        await send({"type": "lifespan.shutdown.complete"})

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        began_at = time.monotonic()
        app: FastAPI | None = None
        error: BaseException | None = None
        try:
            app = self._load()
        except BaseException as fault:
            error = fault
        self.is_loading = False
        if not loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._take(app, error, time.monotonic() - began_at), loop)

    async def _take(self, app: FastAPI | None, error: BaseException | None, seconds: float) -> None:
        if app is not None:
            self._lifespan = app.router.lifespan_context(app)
            await self._lifespan.__aenter__()
            self._app = app
            logger.info("ready after %.1f s of loading", seconds)
        self.error = error
        self.on_end()
