"""Tally: a histogram for Prometheus that costs little to count in.

It knows bounds and counts, and writes the text that prometheus-client's own Histogram writes, less the moments of
creation. It is counted in from one thread; what a scrape reads beside it may be one observation old.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """Counts of observations by the bucket they fall into.

    bounds   upper bounds of the buckets, rising; one without a bound follows
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it.

        >>> tally = Tally("a", "", (1, 2))
        >>> tally.observe(1)
        >>> tally.observe(7)
        >>> tally.counts
        (1, 0, 1)
        """
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations in each bucket alone."""
        return tuple(self._counts)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The buckets as Prometheus counts them, each with all below it."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        total, buckets = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return [HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)]
