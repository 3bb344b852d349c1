"""The built-in page: one HTML file that talks to the API beside it, without anything from elsewhere.

It knows where the file lies and how it may behave in a browser; what it shows, it fetches itself.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    """GET /: the page, which may load nothing and speak to nobody but this server."""
    text = files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(text, headers=headers)
