"""Intervals: medians, percentiles, and how far repeated measurements can be trusted.

It knows numbers only, not what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; beyond the list 1.96 + 2.5 / degrees.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True)
class Interval:
    """A median of repeats and a 95 % interval around it; low and high are None after one repeat."""

    median: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3g} [one run]"
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(values: Sequence[float]) -> Interval:
    """The median of positive repeats, with Student's interval of their logarithms, widened to hold it.

    A handful of repeats is what an eval can afford, and resampling a handful covers far less than it
    says (the bootstrap of three values covers about three quarters); Student's t allows for it.
    """
    if not values:
        raise ValueError("no values; an interval needs at least one measurement")
    median = statistics.median(values)
    if len(values) == 1:
        return Interval(median, None, None)
    logs = [math.log(v) for v in values]
    degrees = len(values) - 1
    t = _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.5 / degrees
    centre, half = statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(len(values))
    return Interval(median, min(math.exp(centre - half), median), max(math.exp(centre + half), median))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics, as numpy's default.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    if not values:
        raise ValueError("no values; a percentile needs at least one measurement")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """P50, P90 and P99; empty where nothing was measured."""
    return {f"p{p}": percentile(values, p) for p in (50, 90, 99)} if values else {}
