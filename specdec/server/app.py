"""The app: routes, and the door every request passes.

It knows paths, methods and headers; what a request means is `Serving`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from specdec.async_engine import AsyncEngine
from specdec.errors import SpecdecError
from specdec.server.door import Door
from specdec.server.errors import HTTPError, as_http_error, error_response
from specdec.server.options import ServerOptions
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.serving import Serving

logger = logging.getLogger("specdec.server")


def create_app(async_engine: AsyncEngine, served_model_name: str, options: ServerOptions | None = None) -> FastAPI:
    """The HTTP application of one engine; leaving its lifespan stops the engine's thread."""
    options = options or ServerOptions()
    serving = Serving(async_engine, served_model_name, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        yield
        async_engine.close()

    app = FastAPI(title="specdec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Door, options=options)
    for kind in (SpecdecError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_generation(app, serving)
    _add_models(app, serving)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = HTTPError(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="no_such_route"
        )
    fault = as_http_error(error)
    if fault.status >= 500:
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
    return error_response(fault)


def _body_schema(kind: type[CompletionBody] | type[ChatBody]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_generation(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        return await serving.complete(request)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
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
        if name != serving.name:
            raise HTTPError(404, f"model {name!r} is not served here; {serving.name!r} is", code="model_not_found")
        return JSONResponse(card)

    @app.get("/health")
    async def health() -> Response:
        if not serving.engine.is_alive:
            raise HTTPError(503, "the engine has stopped; restart the server", code="engine_dead")
        return JSONResponse({"status": "ok"})
