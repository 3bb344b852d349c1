"""Cost: how long a forward of n tokens takes, learned from the forwards that were served.

It knows sizes and seconds. Time over size is a curve with shelves (tiles, graph buckets, kernel
choices), so it is held on a grid of sizes, and the logarithm of the curve is a Gaussian process on
that grid (an Ornstein-Uhlenbeck kernel in log2 n) on top of a seed:

    seconds = scale * (seed(n) * exp(bend(n)) + key * keys - unscored * prompts)

`scale` wanders fast, so a machine that is busy for a while changes all sizes alike and no decision;
`bend` moves slowly. All are estimated together by a Kalman filter of the logarithm of the seconds,
linearised where it stands (Kalman 1960; the grid is the "structured kernel interpolation" of Wilson
and Nickisch 2015 in one dimension). Outliers count for little; a run of them is a change, and believed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

BEND_STD, BEND_OCTAVES = 0.6, 2.0  # the seed may be wrong by a factor of 2 or 3, alike in neighbouring sizes
SCALE_STD, SCALE_WANDER, BEND_WANDER = 1.0, 0.03, 0.004
NOISE_STD, FIRST_NOISE_STD = 0.08, 0.7  # of one step; of the first step of a size, which may compile or allocate
CLIP = 2.5  # standard deviations
CHANGE = 4  # outliers of a size to one side in a row that are a change
_SCALE, _KEY, _PROMPT, _FIRST = 0, 1, 2, 3
DEFAULT_SEED = {1: 0.01, 64: 0.02}
"""Seconds by tokens where nothing was measured: twice the time for 64 times the tokens."""


def make_grid(most: int) -> list[int]:
    """Sizes the curve is held at: all up to 8, then four an octave, up to the first at or above `most`.

    >>> make_grid(20)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    """
    grid = list(range(1, 9))
    while grid[-1] < most:
        step = 1 << (grid[-1].bit_length() - 3)
        grid.append(grid[-1] + step)
    return grid


class ForwardCost:
    """Seconds of a model's forwards.

    seed   tokens -> seconds of a forward that scores every token, with little context
    most   largest number of tokens a forward may hold
    key    seconds a cached token of context adds, to begin with
    """

    def __init__(self, most: int, seed: Mapping[int, float] | None = None, key: float = 0.0) -> None:
        points = sorted((seed or DEFAULT_SEED).items())
        self.grid = make_grid(most)
        sizes, seconds = zip(*points, strict=True)
        seed_curve = _extend(np.array(self.grid, float), sizes, np.maximum.accumulate(np.array(seconds, float)))
        self._seeds: list[float] = seed_curve.tolist()
        one = self._seeds[0]
        size = len(self.grid) + _FIRST
        self._state = np.zeros(size)
        self._state[_KEY], self._key_floor = key, key / 4
        octaves = np.log2(np.array(self.grid, float))
        self._covariance = np.zeros((size, size))
        self._covariance[_SCALE, _SCALE] = SCALE_STD**2
        self._covariance[_KEY, _KEY] = max(key, one * 1e-5) ** 2
        self._covariance[_PROMPT, _PROMPT] = (0.1 * self._seeds[-1] / self.grid[-1]) ** 2
        distance = np.abs(octaves[:, None] - octaves[None, :])
        self._covariance[_FIRST:, _FIRST:] = BEND_STD**2 * np.exp(-distance / BEND_OCTAVES)
        self._bend_variances = self._covariance.reshape(-1)[_FIRST * (size + 1) :: size + 1]  # a view
        self._seen: set[int] = set()
        self._runs: dict[int, int] = {}
        self._points: list[float] = []  # of the curve, at the grid's sizes; none: they must be drawn again
        self._curve = [0.0]  # as far as it was asked for
        self.num_observed = 0

    # ------------------------------------------------------------------ reading

    @property
    def scale(self) -> float:
        """How slow the machine is now, against the seed."""
        return math.exp(float(self._state[_SCALE]))

    def at(self, tokens: int) -> float:
        """Seconds of a forward of so many tokens, all scored, with no context; 0 for none."""
        if tokens < len(self._curve):
            return self._curve[tokens]
        last = self.grid[-1]
        return self._filled(tokens)[tokens] if tokens <= last else self._filled(last)[last] * tokens / last

    def span(self, first: int, last: int) -> list[float]:
        """The same for first..last tokens."""
        if last <= self.grid[-1]:
            return self._filled(last)[first : last + 1]
        return [self.at(n) for n in range(first, last + 1)]

    def seconds(self, tokens: int, keys: int = 0, prompts: int = 0) -> float:
        """The same with `keys` cached tokens read and `prompts` of the tokens not scored."""
        extra = self.scale * float(self._state[_KEY] * keys - self._state[_PROMPT] * prompts)
        value = self.at(tokens)
        return max(value + extra, 0.25 * value)

    def _place(self, tokens: int) -> tuple[int, float]:
        """The grid point below, and how far to the next."""
        grid = self.grid
        i = min(max(bisect.bisect_right(grid, tokens) - 1, 0), len(grid) - 2)
        return i, min(max((tokens - grid[i]) / (grid[i + 1] - grid[i]), 0.0), 1.0)

    def _filled(self, last: int) -> list[float]:
        """The curve up to `last` tokens at least: lines between the points of the grid."""
        curve, grid = self._curve, self.grid
        while len(curve) <= last:
            points = self._points or self._draw()
            below, above = len(curve) - 1, grid[bisect.bisect_left(grid, len(curve))]
            left = points[bisect.bisect_left(grid, below)] if below else 0.0
            right = points[bisect.bisect_left(grid, above)]
            rise = (right - left) / (above - below)
            curve += [left + rise * n for n in range(1, above - below)]
            curve.append(right)
        return curve

    def _draw(self) -> list[float]:
        """The points of the curve, made monotone from both sides so that noise neither lifts nor lowers it."""
        state = self._state.tolist()
        scale = state[_SCALE]
        raw = [seed * math.exp(bend + scale) for seed, bend in zip(self._seeds, state[_FIRST:], strict=True)]
        up = accumulate(raw, max)
        down = list(accumulate(reversed(raw), min))
        self._points = [(a + b) / 2 for a, b in zip(up, reversed(down), strict=True)]
        return self._points

    # ------------------------------------------------------------------ learning

    def observe(self, sizes: Sequence[int], seconds: float, keys: int = 0, prompts: int = 0) -> None:
        """Learn from forwards of `sizes` tokens that took `seconds` together."""
        sizes = [n for n in sizes if n > 0]
        if not sizes or seconds <= 0:
            return
        expected, slope = self._linearise(sizes, keys, prompts)
        p = self._covariance
        p[_SCALE, _SCALE] += SCALE_WANDER**2
        self._bend_variances += BEND_WANDER**2
        is_first = any(n not in self._seen for n in sizes)
        self._seen.update(sizes)
        noise = (FIRST_NOISE_STD if is_first else NOISE_STD) ** 2
        surprise = math.log(seconds / expected)
        moved = p @ slope
        doubt = max(float(slope @ moved), 0.0)
        counted = self._judge(surprise, doubt, noise, self._place(max(sizes))[0])
        if counted is None:  # a change
            moved = p @ slope
            doubt, counted = max(float(slope @ moved), 0.0), noise
        spread = doubt + counted
        self._state = self._state + moved * (surprise / spread)
        p -= moved[:, None] * (moved / spread)
        self._state[_KEY] = max(self._state[_KEY], self._key_floor)
        self._state[_PROMPT] = max(self._state[_PROMPT], 0.0)
        self._points, self._curve = [], [0.0]
        self.num_observed += 1

    def _linearise(self, sizes: Sequence[int], keys: int, prompts: int) -> tuple[float, np.ndarray]:
        """The expected seconds, and how their logarithm depends on each part of the state."""
        state, seeds = self._state.tolist(), self._seeds
        parts = [0.0] * len(state)
        total = 0.0
        for n in sizes:
            i, share = self._place(n)
            stretch = max(n / self.grid[-1], 1.0)
            for place, weight in ((i, 1.0 - share), (i + 1, share)):
                value = weight * stretch * seeds[place] * math.exp(state[_FIRST + place])
                parts[_FIRST + place] += value
                total += value
        whole = max(total + state[_KEY] * keys - state[_PROMPT] * prompts, 0.25 * total)
        slope = np.array(parts)
        slope /= whole
        slope[_SCALE], slope[_KEY], slope[_PROMPT] = 1.0, keys / whole, -prompts / whole
        return whole * self.scale, slope

    def _judge(self, surprise: float, doubt: float, noise: float, place: int) -> float | None:
        """The noise to count a step with: an outlier's grows until it moves less the further it is out.

        Several outliers of a size to one side are a change: then the machine's speed is doubted, and
        a little the size's own place, and the answer is None.
        """
        limit = CLIP * math.sqrt(doubt + noise)
        run = self._runs.get(place, 0)
        if abs(surprise) <= limit:
            self._runs[place] = 0
            return noise
        sign = 1 if surprise > 0 else -1
        self._runs[place] = run = run + sign if run * sign > 0 else sign
        if abs(run) < CHANGE:
            return (doubt + noise) * (surprise / limit) ** 2 - doubt
        self._runs[place] = 0
        for i, share in ((_SCALE, 1.0), (_FIRST + place, 0.1), (_FIRST + place + 1, 0.1)):
            self._covariance[i, i] += share * surprise**2
        return None


def _extend(grid: np.ndarray, sizes: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """Measured points joined by lines, level before the first, straight on behind the last."""
    values = np.interp(grid, sizes, seconds)
    if len(sizes) > 1:
        slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    else:
        slope = seconds[-1] / (64 * sizes[-1])
    behind = grid > sizes[-1]
    values[behind] = seconds[-1] + slope * (grid[behind] - sizes[-1])
    positive: np.ndarray = np.maximum(values, 1e-9)
    return positive
