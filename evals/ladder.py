"""Ladder: what theory says of the ways of batching, held against what was measured.

It knows three numbers of every climb of a rung, and why each claim may fail though theory is right. It
measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evals.intervals import interval


@dataclass(frozen=True, slots=True)
class Climbed:
    """One rung, once.

    throughput   tokens per second with all jobs at once
    latency      mean seconds from arrival to the last token, jobs spread over time; ttft: to the first
    """

    throughput: float
    latency: float
    ttft: float

    def better(self, other: Climbed, by: str) -> float:
        """How much better than the other by one of the three; above 1 is better."""
        mine, its = getattr(self, by), getattr(other, by)
        return float(mine / its if by == "throughput" else its / mine)


@dataclass(frozen=True, slots=True)
class Claim:
    """What theory says of two rungs, and why it may fail here."""

    better: str
    worse: str
    by: str
    unless: str


def claims(k: int) -> list[Claim]:
    """The ladder in theory, from below."""
    return [
        Claim(
            "static", "one at a time", "throughput",
            "a step of many rows costs little more than of one only while it waits for weights; few cores compute",
        ),
        Claim(
            "static, by length", "static", "throughput",
            "this engine pads nothing, so rows of like length save only the thin end of a batch",
        ),
        Claim(
            "dynamic, fixed", "static", "latency",
            "where jobs come faster than batches fill, no timeout is waited for",
        ),
        Claim(
            "dynamic, adaptive", "dynamic, fixed", "ttft",
            "where the next job is mostly expected within the timeout, both wait alike",
        ),
        Claim(
            "continuous", "static", "throughput",
            "rows that finish leave at once here, so a static batch is thin at its end but never padded",
        ),
        Claim(
            "continuous", "dynamic, fixed", "ttft",
            "nobody queues long where batches are short",
        ),
        Claim(
            f"continuous, k={k}", "continuous", "throughput",
            "once a full batch computes instead of waiting for weights, a refused draft costs what a token costs",
        ),
    ]  # fmt: skip


def theory(climbed: Mapping[str, Sequence[Climbed]], k: int) -> str:
    """Each claim with the measured ratio, and where it is not shown, what may have kept it from it."""
    lines = ["what theory says, and what was measured (ratio of the same repeat):"]
    for claim in claims(k):
        pairs = list(zip(climbed.get(claim.better, ()), climbed.get(claim.worse, ())))
        if not pairs:
            continue
        found = interval([better.better(worse, claim.by) for better, worse in pairs])
        said = f"{claim.better} over {claim.worse}, {claim.by}: {found}"
        if found.low is not None and found.low > 1:
            lines.append(f"  shown      {said}")
        elif found.high is not None and found.high < 1:
            lines.append(f"  FAILS      {said}; {claim.unless}")
        else:
            lines.append(f"  not shown  {said}; holds 1: more --repeats narrow it, or else {claim.unless}")
    return "\n".join(lines)
