"""HTTP errors: every refusal in OpenAI's error shape, and which exception means which status.

It knows status codes and the shape of an error body, nothing of what went wrong.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from specdec.errors import EngineDeadError, InvalidRequestError, SpecdecError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class HTTPError(SpecdecError):
    """An answer that is an error, raised from anywhere inside a handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def as_http_error(error: Exception) -> HTTPError:
    """The HTTP face of an exception; what nobody foresaw is a 500 that gives nothing away."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, InvalidRequestError):
        return HTTPError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return HTTPError(503, str(error), code="engine_dead")
    if isinstance(error, SpecdecError):
        return HTTPError(500, str(error), code="request_failed")
    return HTTPError(500, "the server met a fault of its own; its log has the details", code="internal_error")


def error_body(error: HTTPError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: HTTPError) -> JSONResponse:
    """The whole answer."""
    return JSONResponse(error_body(error), error.status, error.headers)
