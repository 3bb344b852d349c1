"""Admission: whether the server takes one more request now.

It knows counts, limits and whether the server is about to stop; it knows nothing of a request but its size.
"""

from __future__ import annotations

from specdec.async_engine import AsyncEngine
from specdec.errors import InvalidRequestError
from specdec.server.errors import HTTPError


class Admission:
    """A bounded queue in front of the engine.

    is_draining   set once the server is told to stop: what runs may end, nothing new begins
    """

    def __init__(self, engine: AsyncEngine, max_waiting: int) -> None:
        self._engine = engine
        self._limit = engine.engine.scheduler.config.max_num_seqs + max_waiting
        self.is_draining = False

    def check_open(self) -> None:
        """Raise 503 when nothing can be served."""
        if not self._engine.is_alive:
            raise HTTPError(503, "the engine has stopped; restart the server", code="engine_dead")
        if self.is_draining:
            raise HTTPError(
                503, "the server is shutting down; try another one", code="draining", headers={"retry-after": "5"}
            )

    def check_room(self, num_choices: int) -> None:
        """Raise 429 when the queue has no room for this many choices."""
        if num_choices > self._limit:
            raise InvalidRequestError(
                f"the request asks for {num_choices} choices; this server takes at most {self._limit} at a time",
                param="n",
            )
        if self._engine.num_unfinished + num_choices > self._limit:
            raise HTTPError(
                429,
                f"the queue is full ({self._engine.num_unfinished} of {self._limit} places taken); try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
