"""Server options: what the operator decides about the surface, apart from models and cache.

It knows defaults and limits of the server; the engine has its own configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import InvalidRequestError

MAX_QUEUE_DELAY_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server treats its clients.

    api_keys                  any of these opens the door; empty: the door is open
    cors_origins              pages of these origins may call; empty: none
    max_body_bytes            larger bodies are refused with 413
    body_timeout_seconds      longest silence while a body is sent; 0: no limit
    max_waiting               choices that may wait beside the running ones; more are refused with 429
    max_requests_per_key      choices of one API key that may run or wait; 0: no limit of its own
    log_prompts               the access log shows what was asked
    request_timeout_seconds   longest life of a request; 0: no limit
    drain_timeout_seconds     how long running requests may go on once the server is told to stop
    max_queue_delay_ms        longest an idle engine waits for more requests before it starts; 0: it never waits
    keep_alive_seconds        silence in a stream after which a comment is sent
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    body_timeout_seconds: float = 60.0
    max_waiting: int = 1024
    max_requests_per_key: int = 0
    log_prompts: bool = False
    request_timeout_seconds: float = 0.0
    drain_timeout_seconds: float = 30.0
    max_queue_delay_ms: float = 0.0
    keep_alive_seconds: float = 15.0

    def __post_init__(self) -> None:
        for name in ("api_keys", "cors_origins"):
            if any(not value or not value.isascii() or not value.isprintable() for value in getattr(self, name)):
                raise InvalidRequestError(
                    f"{name} holds an empty value, or one no header can carry (printable ASCII can); leave it out",
                    param=name,
                )
        for name in ("max_body_bytes", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        if self.max_requests_per_key < 0:
            raise InvalidRequestError(
                f"max_requests_per_key is {self.max_requests_per_key}; it must be 0 (no limit) or more",
                param="max_requests_per_key",
            )
        if not 0 <= self.max_queue_delay_ms <= MAX_QUEUE_DELAY_MS:
            raise InvalidRequestError(
                f"max_queue_delay_ms is {self.max_queue_delay_ms}; it must be from 0 to {MAX_QUEUE_DELAY_MS:g}",
                param="max_queue_delay_ms",
            )
        for name in ("body_timeout_seconds", "request_timeout_seconds", "drain_timeout_seconds", "keep_alive_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequestError(f"{name} is {value}; it must be a number of seconds, 0 or more", param=name)
