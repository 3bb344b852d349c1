"""Acceptance: how likely the target agrees to the j-th draft of a request, where it agreed to those before.

It knows outcomes only: who offered, at which place, how sure it was, and whether it was right. The
chance is a logistic model, learned online as independent Gaussians over its few weights
(assumed-density filtering with the extended Kalman filter's update for a logistic observation; the
averaged prediction is MacKay's, "The evidence framework applied to classification networks", 1992):

    c = sigmoid(place[source, j] + slope[source] * logit(confidence) + own[request, source])

`place` is the prior that all requests share, `own` what is particular to one request. All forget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

START = 0.4  # log-odds of a draft nothing is known of: 0.6
PLACE_VARIANCE, OWN_VARIANCE, SLOPE_VARIANCE = 2.0, 2.5, 0.25
MAX_CONFIDENCE = 0.995  # a proposer that says 1.0 means "very sure"
PLACE_MEMORY, OWN_MEMORY = 0.998, 0.95  # share of what is known that outlives an outcome
SLEEP_MEMORY = 0.98  # share of what is known of a request that outlives a step without outcome
NUM_CASES = 16  # confidences of past offers that stand for those of the next
SETTLED, SETTLED_EVERY = 64, 4  # after so many steps, what does without confidences learns from one in so many
MAX_MOVE = 2.0  # of a weight in one step, in log-odds


@dataclass(frozen=True, slots=True)
class Ask:
    """One row whose chances are asked for.

    depth         how many drafts
    confidences   what the proposer says of them; none: only history is used
    certain       which of them a grammar forces; none: no one
    """

    request_id: str
    source: str
    depth: int
    confidences: tuple[float, ...] = ()
    certain: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's judged drafts: `accepted` right ones, then a wrong one unless all `drafted` were right.

    Of drafts that are certain nothing is learned: they say nothing of the guesses beside them.
    """

    request_id: str
    source: str
    drafted: int
    accepted: int
    confidences: tuple[float, ...] = ()
    certain: tuple[bool, ...] = ()


def logit(probability: np.ndarray) -> np.ndarray:
    """Log-odds, kept finite."""
    p = np.clip(probability, 1.0 - MAX_CONFIDENCE, MAX_CONFIDENCE)
    odds: np.ndarray = np.log(p / (1.0 - p))
    return odds


def _moderated(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The mean of a sigmoid of a Gaussian, by MacKay's approximation."""
    found: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(mean / np.sqrt(1.0 + math.pi / 8.0 * variance), -30, 30)))
    return found


def _certain(rows: Sequence[Ask | Outcome], deepest: int) -> np.ndarray:
    """Which drafts are forced, [R, K]."""
    found = np.zeros((len(rows), deepest), bool)
    for r, row in enumerate(rows):
        if row.certain:
            found[r, : len(row.certain)] = row.certain[:deepest]
    return found


class _Weights:
    """Gaussian weights by place, all starting alike; places never judged read as the last that was."""

    def __init__(self, mean: float, variance: float, size: int) -> None:
        self.first_mean, self.first_variance = mean, variance
        self.mean = np.full(size, mean)
        self.variance = np.full(size, variance)
        self._num_seen = 0

    def widen(self, size: int) -> None:
        """Hold at least so many places."""
        missing = size - len(self.mean)
        if missing > 0:
            self.mean = np.append(self.mean, np.full(missing, self.mean[-1]))
            self.variance = np.append(self.variance, np.full(missing, self.first_variance))

    def learn(self, information: np.ndarray, pull: np.ndarray, count: np.ndarray) -> None:
        """Take information (1 / variance) and its pull from `count` outcomes at each place, [K]."""
        size = len(information)
        mean, precision = self.mean[:size], 1.0 / self.variance[:size] + information
        mean = mean + np.clip(pull / precision, -MAX_MOVE, MAX_MOVE)
        kept = PLACE_MEMORY**count
        again = (1.0 - kept) / self.first_variance
        precision = kept * precision
        self.mean[:size] = (precision * mean + again * self.first_mean) / (precision + again)
        self.variance[:size] = 1.0 / (precision + again)
        self._num_seen = max(self._num_seen, int(np.flatnonzero(count)[-1]) + 1 if count.any() else 0)
        self.mean[self._num_seen :] = self.mean[max(self._num_seen - 1, 0)]


class Acceptance:
    """Chances of all requests; `step` is the controller's count, by which what is old is forgotten."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, bool], _Weights] = {}
        self._slopes: dict[str, _Weights] = {}
        self._own: dict[str, dict[str, tuple[float, float, int]]] = {}  # request, source: mean, variance, step
        self._said: dict[str, deque[tuple[float, ...]]] = {}
        self._num_learned = 0

    def keep(self, request_ids: set[str]) -> None:
        """Forget all requests but these."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered."""
        return len(self._own)

    def chances(self, asks: Sequence[Ask], step: int) -> np.ndarray:
        """The conditional chances c, [R, K]; 0 behind a row's depth."""
        deepest = max((ask.depth for ask in asks), default=0)
        if not asks or not deepest:
            return np.zeros((len(asks), deepest))
        mean, variance, _ = self._model(asks, deepest, step)
        found = _moderated(mean, variance)
        found[_certain(asks, deepest)] = 1.0
        found[np.arange(deepest)[None, :] >= np.array([ask.depth for ask in asks])[:, None]] = 0.0
        return found

    def _model(
        self, asks: Sequence[Ask | Outcome], deepest: int, step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean and variance of the log-odds and the confidences' log-odds, each [R, K]."""
        own = np.array([self._belief(ask.request_id, ask.source, step) for ask in asks])
        mean, variance = np.repeat(own[:, :1], deepest, axis=1), np.repeat(own[:, 1:], deepest, axis=1)
        x = np.zeros((len(asks), deepest))
        kinds = [(ask.source, bool(ask.confidences)) for ask in asks]
        for source, is_sure in dict.fromkeys(kinds):
            rows = np.array([kind == (source, is_sure) for kind in kinds])
            places = self._place(source, is_sure, deepest)
            mean[rows] += places.mean[:deepest]
            variance[rows] += places.variance[:deepest]
            if is_sure:
                slope = self._slope(source)
                for r in np.flatnonzero(rows).tolist():
                    said = asks[r].confidences[:deepest]
                    x[r, : len(said)] = logit(np.array(said))
                mean[rows] += slope.mean[0] * x[rows]
                variance[rows] += slope.variance[0] * x[rows] ** 2
        return mean, variance, x

    def note(self, offers: Sequence[Ask]) -> None:
        """Remember what offers said of themselves, the last few of each source: what the next may say."""
        for offer in offers:
            if offer.confidences:
                self._said.setdefault(offer.source, deque(maxlen=NUM_CASES)).append(offer.confidences)

    def cases(
        self, request_ids: Sequence[str], source: str, depth: int, step: int, *, by_confidence: bool = True
    ) -> np.ndarray:
        """Conditional chances of drafts that `source` has not made yet, [R, S, depth]: each row in S cases.

        A case is what an offer of late said of itself, behind its end as at its last place; where none has
        spoken there is one, without.
        """
        own = np.array([self._belief(request_id, source, step) for request_id in request_ids])
        said = self._said.get(source) if by_confidence else None
        places = self._place(source, bool(said), depth)
        mean, variance = places.mean[None, :depth], places.variance[None, :depth]
        if said:
            x = logit(np.array([(*c, *[c[-1]] * depth)[:depth] for c in said]))
            slope = self._slope(source)
            mean, variance = mean + slope.mean[0] * x, variance + slope.variance[0] * x**2
        return _moderated(mean[None] + own[:, 0, None, None], variance[None] + own[:, 1, None, None])

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Take the outcomes of one step's rows, one a request.

        Both models of a place learn, with and without the confidence; the request's own weight learns
        from the one that knows more.
        """
        outcomes = [o for o in outcomes if not all(o.certain) or len(o.certain) < o.drafted]
        sure = [outcome for outcome in outcomes if outcome.confidences]
        blind = [replace(outcome, confidences=()) for outcome in outcomes]
        unsure = {outcome.request_id for outcome in outcomes if not outcome.confidences}
        self._num_learned += 1
        if unsure or self._num_learned <= SETTLED or self._num_learned % SETTLED_EVERY == 0:
            self._learn(blind, step, unsure)
        self._learn(sure, step, {outcome.request_id for outcome in sure})

    def _learn(self, outcomes: Sequence[Outcome], step: int, own: set[str]) -> None:
        deepest = max((min(o.accepted + 1, o.drafted) for o in outcomes), default=0)
        if not deepest:
            return
        mean, variance, x = self._model(outcomes, deepest, step)
        chance = _moderated(mean, variance)
        place = np.arange(deepest)[None, :]
        accepted = np.array([o.accepted for o in outcomes])[:, None]
        judged = (place < np.array([o.drafted for o in outcomes])[:, None]) & (place <= accepted)
        judged &= ~_certain(outcomes, deepest)
        surprise = np.where(judged, (place < accepted) - chance, 0.0)
        slope = np.where(judged, np.maximum(chance * (1.0 - chance), 0.01), 0.0)
        self._learn_shared(outcomes, _Evidence(judged, surprise, slope, variance, x))
        if own:
            self._learn_own(outcomes, step, own, _Evidence(judged, surprise, slope, variance, x))

    def _learn_shared(self, outcomes: Sequence[Outcome], seen: _Evidence) -> None:
        sources = sorted({(o.source, bool(o.confidences)) for o in outcomes})
        for source, is_sure in sources:
            rows = np.array([o.source == source and bool(o.confidences) == is_sure for o in outcomes])
            weights = self._place(source, is_sure, seen.judged.shape[1])
            weights.learn(*seen.of(rows, weights.variance))
            if is_sure:
                slope = self._slope(source)
                slope.learn(*(part.sum(keepdims=True) for part in seen.of(rows, slope.variance, by_x=True)))

    def _learn_own(self, outcomes: Sequence[Outcome], step: int, which: set[str], seen: _Evidence) -> None:
        """Each request's own weight, from its row."""
        beliefs = [self._belief(outcome.request_id, outcome.source, step) for outcome in outcomes]
        rest = 1.0 + seen.slope * (seen.variance - np.array([variance for _, variance in beliefs])[:, None])
        information = (seen.slope / rest).sum(axis=1).tolist()
        pull = (seen.surprise / rest).sum(axis=1).tolist()
        counts = np.count_nonzero(seen.slope, axis=1).tolist()
        for r, outcome in enumerate(outcomes):
            if outcome.request_id not in which or not counts[r]:
                continue
            mean, variance = beliefs[r]
            precision = 1.0 / variance + information[r]
            mean += min(max(pull[r] / precision, -MAX_MOVE), MAX_MOVE)
            kept = OWN_MEMORY ** counts[r]
            again = (1.0 - kept) / OWN_VARIANCE
            precision *= kept
            known = self._own.setdefault(outcome.request_id, {})
            known[outcome.source] = (precision * mean / (precision + again), 1.0 / (precision + again), step)

    def _belief(self, request_id: str, source: str, step: int) -> tuple[float, float]:
        """Mean and variance of a request's own weight, as of this step; nothing is changed."""
        own = self._own.get(request_id, {}).get(source)
        if own is None:
            return 0.0, OWN_VARIANCE
        mean, variance, known = own
        if step <= known + 1:
            return mean, variance
        memory = SLEEP_MEMORY ** min(step - known, 1000)
        kept, again = memory / variance, (1.0 - memory) / OWN_VARIANCE
        return kept * mean / (kept + again), 1.0 / (kept + again)

    def _place(self, source: str, is_sure: bool, size: int) -> _Weights:
        weights = self._places.get((source, is_sure))
        if weights is None:
            weights = self._places[source, is_sure] = _Weights(0.0 if is_sure else START, PLACE_VARIANCE, size)
        weights.widen(size)
        return weights

    def _slope(self, source: str) -> _Weights:
        if source not in self._slopes:
            self._slopes[source] = _Weights(1.0, SLOPE_VARIANCE, 1)
        return self._slopes[source]


@dataclass(frozen=True, slots=True)
class _Evidence:
    """A step's outcomes as arrays, [R, K]: which were judged, how they surprised, and the doubt they met."""

    judged: np.ndarray
    surprise: np.ndarray
    slope: np.ndarray
    variance: np.ndarray
    x: np.ndarray

    def of(self, rows: np.ndarray, own: np.ndarray, *, by_x: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Information, pull and count for the weights of variance `own` that these rows share, each [K]."""
        x = self.x[rows] if by_x else np.ones_like(self.x[rows])
        size = self.judged.shape[1]
        others = np.maximum(self.variance[rows] - own[: size if not by_x else 1] * x**2, 0.0)
        rest = 1.0 + self.slope[rows] * others
        information = (self.slope[rows] * x**2 / rest).sum(axis=0)
        pull = (self.surprise[rows] * x / rest).sum(axis=0)
        return information, pull, self.judged[rows].sum(axis=0)
