"""Intervals hold what they promise on the few repeats an eval can afford."""

from __future__ import annotations

import math
import random

import pytest

from evals.intervals import interval, percentile


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_a_ratio_of_equals_contains_one(repeats: int) -> None:
    """500 seeds of two equal systems on a machine with 10 % noise: at least 92 % of the intervals hold 1.

    With true coverage 95 % the share has a standard error of 1 point, so a false alarm would be about one in
    a thousand, and the seeds are fixed.
    """
    covered = 0
    for seed in range(500):
        noise = random.Random(seed)
        found = interval([math.exp(noise.gauss(0, 0.1)) / math.exp(noise.gauss(0, 0.1)) for _ in range(repeats)])
        assert found.low is not None and found.high is not None
        covered += found.low <= 1 <= found.high
    assert covered >= 0.92 * 500


def test_a_real_difference_is_seen() -> None:
    """Negative control: 20 % apart with 2 % noise, five repeats."""
    noise = random.Random(0)
    found = interval([0.8 * math.exp(noise.gauss(0, 0.02)) for _ in range(5)])
    assert found.high is not None and found.high < 1


def test_one_repeat_has_no_interval() -> None:
    found = interval([3.0])
    assert (found.median, found.low, found.high) == (3.0, None, None)
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_percentiles_at_the_ends() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile([1.0, 2.0], 100) == 2.0
    assert percentile([1.0, 2.0], 0) == 1.0


def test_resampling_three_values_would_not_do() -> None:
    """Negative control: the range of three repeats, the most a bootstrap can say, holds 1 in about 3 of 4 seeds."""
    covered = 0
    for seed in range(500):
        noise = random.Random(seed)
        values = [math.exp(noise.gauss(0, 0.1)) / math.exp(noise.gauss(0, 0.1)) for _ in range(3)]
        covered += min(values) <= 1 <= max(values)
    assert covered < 0.85 * 500
