"""The app: routes, and the door every request passes.

It knows paths, methods and headers; what a request means is `Serving`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from specdec import __version__
from specdec.async_engine import AsyncEngine
from specdec.errors import SpecdecError
from specdec.queue_delay import QueueDelay
from specdec.server.door import Door
from specdec.server.errors import HTTPError, as_http_error, error_response
from specdec.server.options import ServerOptions
from specdec.server.page import add_page
from specdec.server.protocol import ChatBody, CompletionBody, body_schema
from specdec.server.serving import Serving
from specdec.server.text_routes import add_text_routes

logger = logging.getLogger("specdec.server")


def create_app(async_engine: AsyncEngine, served_model_name: str, options: ServerOptions | None = None) -> FastAPI:
    """The HTTP application of one engine; leaving its lifespan stops the engine's thread."""
    options = options or ServerOptions()
    serving = Serving(async_engine, served_model_name, options)
    async_engine.queue_delay = QueueDelay(options.max_queue_delay_ms / 1e3)
    async_engine.on_step = serving.metrics.count_step

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        yield
        async_engine.close()

    app = FastAPI(title="specdec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = serving
    app.add_middleware(Door, options=options)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    for kind in (SpecdecError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_generation(app, serving)
    _add_models(app, serving)
    _add_probes(app, serving)
    add_text_routes(app, serving)
    add_page(app)
    return app


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client left while it sent its body."""
    return Response(status_code=499)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path}"
        message = (
            f"{what} is not served here; GET /openapi.json lists what is" if error.status_code in (404, 405) else ""
        )
        error = HTTPError(error.status_code, message or f"{what}: {error.detail}", code="no_such_route")
    fault = as_http_error(error)
    if fault.status >= 500:
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
    return error_response(fault)


def _add_generation(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        return await serving.complete(request)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await serving.chat(request)


def _add_models(app: FastAPI, serving: Serving) -> None:
    card = {
        "id": serving.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "specdec",
        "max_model_len": serving.engine.engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        serving.check_model(name)
        return JSONResponse(card)


def _add_probes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Alive: the engine's thread runs, whether or not it takes requests."""
        if not serving.engine.is_alive:
            serving.admission.check_open()
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Can serve: false while the server drains."""
        serving.admission.check_open()
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)
