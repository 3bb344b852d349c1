"""Queue delay: how long an idle engine waits for company before it starts.

It knows times of arrivals and one limit; it knows no requests and no threads. Continuous batching lets
latecomers join at once, so waiting pays only where many come within a step's time of each other.
"""

from __future__ import annotations

_WEIGHT_OF_NEW = 0.25
_GAPS_WORTH_WAITING = 2.0


class QueueDelay:
    """Waits while the next arrival is likely to come within the limit, and no longer.

    most   longest wait of the first that came, seconds; 0: never wait
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._gap: float | None = None
        self._first_at: float | None = None
        self._last_at: float | None = None

    def note_arrival(self, now: float) -> None:
        """Requests came in."""
        if self._last_at is not None:
            gap = now - self._last_at
            self._gap = gap if self._gap is None else self._gap + _WEIGHT_OF_NEW * (gap - self._gap)
        self._last_at = now
        if self._first_at is None:
            self._first_at = now

    def note_start(self) -> None:
        """The engine starts; whoever comes now starts a new group."""
        self._first_at = None

    def left(self, now: float) -> float:
        """Seconds that are worth waiting for the next arrival; 0: start.

        >>> delay = QueueDelay(0.010)
        >>> delay.note_arrival(0.000)
        >>> delay.left(0.000)              # nothing is known of the rate yet
        0.0
        >>> delay.note_arrival(0.001)      # they come every millisecond: wait for two gaps
        >>> round(delay.left(0.001), 4)
        0.002
        >>> delay.left(0.010)              # the first has waited long enough
        0.0
        """
        if self._first_at is None or self._last_at is None or self._gap is None or self._gap > self.most:
            return 0.0
        until = min(self._first_at + self.most, self._last_at + _GAPS_WORTH_WAITING * self._gap)
        return max(until - now, 0.0)
