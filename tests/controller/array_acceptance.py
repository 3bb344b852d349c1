"""The acceptance model in arrays over all rows and places at once: what the quick form is held against.

It has no memory of what offers said; it knows the formulas of `specdec.control.acceptance` and shares its constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.control import acceptance as quick
from specdec.control.acceptance import Ask, Outcome

WIDTH = 12
"""Most places."""


def moderated(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(mean / np.sqrt(1.0 + np.pi / 8.0 * variance), -30, 30)))
    return found


class Weights:
    def __init__(self, mean: float, variance: float, size: int) -> None:
        self.first_mean, self.first_variance = mean, variance
        self.mean, self.variance = np.full(size, mean), np.full(size, variance)
        self.num_seen = 0

    def learn(self, information: np.ndarray, pull: np.ndarray, count: np.ndarray) -> None:
        size = len(information)
        precision = 1.0 / self.variance[:size] + information
        mean = self.mean[:size] + np.clip(pull / precision, -quick.MAX_MOVE, quick.MAX_MOVE)
        kept = quick.PLACE_MEMORY**count
        again = (1.0 - kept) / self.first_variance
        precision = kept * precision
        self.mean[:size] = (precision * mean + again * self.first_mean) / (precision + again)
        self.variance[:size] = 1.0 / (precision + again)
        self.num_seen = max(self.num_seen, int(np.flatnonzero(count)[-1]) + 1 if count.any() else 0)
        self.mean[self.num_seen :] = self.mean[max(self.num_seen - 1, 0)]


class ArrayAcceptance:
    """Chances and learning, for outcomes of any sources in one step."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, bool], Weights] = {}
        self.slopes: dict[str, Weights] = {}
        self.own: dict[tuple[str, str], tuple[float, float, int]] = {}
        self.num_learned = 0

    def chances(self, asks: Sequence[Ask], step: int) -> np.ndarray:
        mean, variance, _ = self.model(asks, step)
        own = np.array([self.belief(ask.request_id, ask.source, step)[1] for ask in asks])[:, None]
        two = np.stack([moderated(mean + z * np.sqrt(own), variance - own) for z in (1.0, -1.0)])
        two[:, certain(asks)] = 1.0
        reached = np.cumprod(two, axis=-1).mean(axis=0)
        found = np.concatenate([reached[:, :1], reached[:, 1:] / reached[:, :-1]], axis=1)
        found[np.arange(WIDTH)[None, :] >= np.array([ask.depth for ask in asks])[:, None]] = 0.0
        return found

    def model(self, rows: Sequence[Ask | Outcome], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        own = np.array([self.belief(row.request_id, row.source, step) for row in rows])
        mean, variance = np.repeat(own[:, :1], WIDTH, axis=1), np.repeat(own[:, 1:], WIDTH, axis=1)
        x = np.zeros_like(mean)
        for r, row in enumerate(rows):
            places = self.place(row.source, bool(row.confidences))
            mean[r] += places.mean
            variance[r] += places.variance
            if row.confidences:
                p = np.clip(np.array(row.confidences), 1.0 - quick.MAX_CONFIDENCE, quick.MAX_CONFIDENCE)
                x[r, : len(p)] = np.log(p / (1.0 - p))
                slope = self.slope(row.source)
                mean[r] += slope.mean[0] * x[r]
                variance[r] += slope.variance[0] * x[r] ** 2
        return mean, variance, x

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        outcomes = [o for o in outcomes if not all(o.certain) or len(o.certain) < o.drafted]
        unsure = {o.request_id for o in outcomes if not o.confidences}
        self.num_learned += 1
        if unsure or self.num_learned <= quick.SETTLED or self.num_learned % quick.SETTLED_EVERY == 0:
            self._learn([o._replace(confidences=()) for o in outcomes], step, unsure)
        sure = [o for o in outcomes if o.confidences]
        self._learn(sure, step, {o.request_id for o in sure})

    def _learn(self, outcomes: Sequence[Outcome], step: int, learns: set[str]) -> None:
        if not outcomes:
            return
        mean, variance, x = self.model(outcomes, step)
        chance, place = moderated(mean, variance), np.arange(WIDTH)[None, :]
        accepted = np.array([o.accepted for o in outcomes])[:, None]
        judged = (place < np.array([o.drafted for o in outcomes])[:, None]) & (place <= accepted) & ~certain(outcomes)
        surprise = np.where(judged, (place < accepted) - chance, 0.0)
        slope = np.where(judged, np.maximum(chance * (1.0 - chance), 0.01), 0.0)
        beliefs = [self.belief(o.request_id, o.source, step) for o in outcomes]
        for source, is_sure in {(o.source, bool(o.confidences)) for o in outcomes}:
            rows = np.array([o.source == source for o in outcomes])
            weights = self.place(source, is_sure)
            rest = 1.0 + slope[rows] * (variance[rows] - weights.variance)
            tilt = self.slope(source)
            tilted = 1.0 + slope[rows] * (variance[rows] - tilt.variance[0] * x[rows] ** 2)
            told = ((slope[rows] * x[rows] ** 2 / tilted).sum(), (surprise[rows] * x[rows] / tilted).sum())
            count = judged[rows].sum(axis=0)
            weights.learn((slope[rows] / rest).sum(axis=0), (surprise[rows] / rest).sum(axis=0), count)
            if is_sure:
                tilt.learn(*(np.array([part]) for part in (*told, count.sum())))
        for r, outcome in enumerate(outcomes):
            if outcome.request_id in learns and judged[r].any():
                mean_r, variance_r = beliefs[r]
                rest = 1.0 + slope[r] * (variance[r] - variance_r)
                precision = 1.0 / variance_r + (slope[r] / rest).sum()
                mean_r += np.clip((surprise[r] / rest).sum() / precision, -quick.MAX_MOVE, quick.MAX_MOVE)
                kept = quick.OWN_MEMORY ** judged[r].sum()
                again, precision = (1.0 - kept) / quick.OWN_VARIANCE, kept * precision
                found = (precision * mean_r / (precision + again), 1.0 / (precision + again), step)
                self.own[outcome.request_id, outcome.source] = found

    def belief(self, request_id: str, source: str, step: int) -> tuple[float, float]:
        mean, variance, last = self.own.get((request_id, source), (0.0, quick.OWN_VARIANCE, step))
        if step <= last + 1:
            return mean, variance
        memory = quick.SLEEP_MEMORY ** min(step - last, 1000)
        kept, again = memory / variance, (1.0 - memory) / quick.OWN_VARIANCE
        return kept * mean / (kept + again), 1.0 / (kept + again)

    def place(self, source: str, is_sure: bool) -> Weights:
        first = Weights(0.0 if is_sure else quick.START, quick.PLACE_VARIANCE, WIDTH)
        return self.places.setdefault((source, is_sure), first)

    def slope(self, source: str) -> Weights:
        return self.slopes.setdefault(source, Weights(1.0, quick.SLOPE_VARIANCE, 1))


def certain(rows: Sequence[Ask | Outcome]) -> np.ndarray:
    found = np.zeros((len(rows), WIDTH), bool)
    for r, row in enumerate(rows):
        found[r, : len(row.certain)] = row.certain
    return found
