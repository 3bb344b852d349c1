"""Server options: what the operator decides about the surface, apart from models and cache.

It knows defaults and limits of the server; the engine has its own configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server treats its clients.

    api_keys             any of these opens the door; empty: the door is open
    max_body_bytes       larger bodies are refused with 413
    keep_alive_seconds   silence in a stream after which a comment is sent
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    keep_alive_seconds: float = 15.0
