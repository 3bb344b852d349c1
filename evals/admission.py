"""Admission: when waiting jobs may enter the engine, the classical ways of batching as small rules.

A rule sees who waits, how many run and what time it is. It knows no engine and no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evals.load import Job


@dataclass(frozen=True, slots=True)
class Arrived:
    """A job that waits, and when it came."""

    index: int
    job: Job
    moment: float

    @property
    def length(self) -> int:
        """Most tokens it can come to, prompt and output."""
        return len(self.job.token_ids) + self.job.max_tokens


class Rule(Protocol):
    """Who enters now, in order of arrival unless the rule says otherwise.

    waiting       in order of arrival
    num_running   jobs in the engine
    is_last       no further job will arrive
    """

    label: str

    def admit(self, waiting: Sequence[Arrived], num_running: int, now: float, is_last: bool) -> list[Arrived]:
        """The jobs to submit at this moment."""
        ...

    def deadline(self, waiting: Sequence[Arrived]) -> float:
        """When to ask again though nobody arrives; infinity for never."""
        ...


class Continuous:
    """Everybody enters at once; the engine's own batcher takes them at its next step."""

    label = "continuous"

    def admit(self, waiting: Sequence[Arrived], num_running: int, now: float, is_last: bool) -> list[Arrived]:
        """All who wait."""
        return list(waiting)

    def deadline(self, waiting: Sequence[Arrived]) -> float:
        """Never."""
        return math.inf


@dataclass(slots=True)
class Static:
    """A batch enters when it is full and the one before it is done; size 1 is one at a time.

    window   of the first `window` who wait, those nearest in length to the oldest are taken; at `size`
             the batch is simply the oldest, above it batches are bucketed by length
    """

    size: int
    window: int
    label: str

    def admit(self, waiting: Sequence[Arrived], num_running: int, now: float, is_last: bool) -> list[Arrived]:
        """A full batch, or what is left when nobody else will come."""
        if num_running or not waiting or (len(waiting) < self.size and not is_last):
            return []
        oldest = waiting[0]
        near = sorted(waiting[: self.window], key=lambda a: (a is not oldest, abs(a.length - oldest.length), a.moment))
        return near[: self.size]

    def deadline(self, waiting: Sequence[Arrived]) -> float:
        """Never."""
        return math.inf


@dataclass(slots=True)
class Dynamic:
    """A batch enters when it is full or its oldest has waited long enough, and the one before it is done."""

    size: int
    timeout: float
    label: str = "dynamic, fixed timeout"

    def admit(self, waiting: Sequence[Arrived], num_running: int, now: float, is_last: bool) -> list[Arrived]:
        """The oldest `size`, once it is time."""
        is_due = len(waiting) >= self.size or is_last or now >= self.deadline(waiting)
        return list(waiting[: self.size]) if waiting and not num_running and is_due else []

    def deadline(self, waiting: Sequence[Arrived]) -> float:
        """When the oldest has waited for the timeout."""
        return waiting[0].moment + self.timeout if waiting else math.inf


@dataclass(slots=True)
class AdaptiveDynamic:
    """As Dynamic, but it waits only while the next arrival is likely within the timeout.

    The rate is a running mean of the gaps between arrivals (the newest weighs a fifth): where the next
    is expected later than the timeout allows, waiting would only cost.
    """

    size: int
    timeout: float
    label: str = "dynamic, adaptive timeout"
    _gap: float | None = None
    _last: float | None = None
    _seen: set[int] = field(default_factory=set)

    def admit(self, waiting: Sequence[Arrived], num_running: int, now: float, is_last: bool) -> list[Arrived]:
        """The oldest `size`, once full, or once nobody else is expected in time."""
        self._learn(waiting)
        is_due = len(waiting) >= self.size or is_last or now >= self.deadline(waiting)
        return list(waiting[: self.size]) if waiting and not num_running and is_due else []

    def deadline(self, waiting: Sequence[Arrived]) -> float:
        """Now, if the next arrival is expected too late; else when the timeout of the oldest ends."""
        if not waiting:
            return math.inf
        ends = waiting[0].moment + self.timeout
        if self._gap is not None and waiting[-1].moment + self._gap > ends:
            return waiting[-1].moment
        return ends

    def _learn(self, waiting: Sequence[Arrived]) -> None:
        for arrived in waiting:
            if arrived.index in self._seen:
                continue
            self._seen.add(arrived.index)
            if self._last is not None:
                gap = arrived.moment - self._last
                self._gap = gap if self._gap is None else 0.8 * self._gap + 0.2 * gap
            self._last = arrived.moment


def padding_waste(batches: Sequence[Sequence[int]]) -> float:
    """Share of a padded batch that is padding, every row as long as its longest.

    batches   lengths of the rows of every batch that entered together

    Our engine is ragged and computes no padding; this is what these batches would cost one that pads.

    >>> round(padding_waste([[10, 5], [4]]), 4)
    0.2083
    """
    whole = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(map(sum, batches)) / whole if whole else 0.0
