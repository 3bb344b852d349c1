"""Admission: whether the server takes one more request now.

It knows counts, limits and whether the server is about to stop; it knows nothing of a request but its size.
"""

from __future__ import annotations

from collections import Counter as Tally

from specdec.async_engine import AsyncEngine
from specdec.errors import InvalidRequestError
from specdec.server.errors import HTTPError


class Admission:
    """A bounded queue in front of the engine, and a bound for every API key.

    is_draining   set once the server is told to stop: what runs may end, nothing new begins
    """

    def __init__(self, engine: AsyncEngine, max_waiting: int, max_per_key: int = 0) -> None:
        self._engine = engine
        self._limit = engine.engine.scheduler.config.max_num_seqs + max_waiting
        self._max_per_key = max_per_key
        self._by_key: Tally[int | None] = Tally()
        self.is_draining = False

    def check_open(self) -> None:
        """Raise 503 when nothing can be served."""
        if not self._engine.is_alive:
            raise HTTPError(503, "the engine has stopped; restart the server", code="engine_dead")
        if self.is_draining:
            raise HTTPError(
                503, "the server is shutting down; try another one", code="draining", headers={"retry-after": "5"}
            )

    def check_room(self, num_choices: int, key: int | None) -> None:
        """Raise 429 when the queue, or the key's share of it, has no room for this many choices.

        key   which of the server's keys the client sent; None where there are none
        """
        has_own = key is not None and self._max_per_key > 0
        most = min(self._limit, self._max_per_key) if has_own else self._limit
        if num_choices > most:
            raise InvalidRequestError(
                f"the request asks for {num_choices} choices; this server takes at most {most} at a time", param="n"
            )
        if has_own and self._by_key[key] + num_choices > most:
            raise _come_back(f"this key has {self._by_key[key]} of its {most} places taken", "key_limit")
        if self._engine.num_unfinished + num_choices > self._limit:
            raise _come_back(f"the queue is full: {self._engine.num_unfinished} of {self._limit} places", "queue_full")

    def enter(self, num_choices: int, key: int | None) -> None:
        """Choices were queued."""
        self._by_key[key] += num_choices

    def leave(self, num_choices: int, key: int | None) -> None:
        """They are over."""
        self._by_key[key] -= num_choices


def _come_back(message: str, code: str) -> HTTPError:
    return HTTPError(429, f"{message}; try again later", code=code, headers={"retry-after": "1"})
