"""Arrivals: at which moments requests come. It knows patterns and traces; it sends nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

PATTERNS = ("poisson", "bursts", "trace")
BURST = 8


def arrivals(pattern: str, count: int, rate: float, seed: int, gaps: Sequence[float] = ()) -> list[float]:
    """Seconds of `count` arrivals at a mean rate: "poisson", "bursts" of eight at once, or a trace's own rhythm.

    gaps   of the trace, in any unit: they are stretched until their mean is that of the rate, and repeated at need

    >>> arrivals("trace", 4, 2.0, 0, gaps=[1, 3])
    [0.0, 0.25, 1.0, 1.25]
    """
    if pattern == "trace":
        stretch = len(gaps) / sum(gaps) / rate
        moments = [0.0]
        while len(moments) < count:
            moments.append(moments[-1] + stretch * gaps[(len(moments) - 1) % len(gaps)])
        return moments[:count]
    noise = random.Random(seed)
    size = {"poisson": 1, "bursts": BURST}[pattern]
    moments, now = [], 0.0
    while len(moments) < count:
        moments += [now] * size
        now += noise.expovariate(rate / size)
    return moments[:count]


def read_gaps(path: Path) -> list[float]:
    """Gaps between the arrivals of a trace: a time a line, or JSON records with `timestamp` or `arrival`."""
    moments = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            moments.append(float(value.get("timestamp", value.get("arrival")) if isinstance(value, dict) else value))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number} holds no time: {line[:60]!r}") from error
    gaps = [late - early for early, late in pairwise(sorted(moments))]
    if not sum(gaps) > 0:
        raise ValueError(f"{path.name} holds {len(moments)} arrivals; a trace needs two at different times")
    return gaps
