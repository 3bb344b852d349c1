"""Acceptance: how likely the target agrees to the j-th draft of a request, where it agreed to those before.

It knows outcomes only: who offered, at which place, how sure it was, and whether it was right. The
chance is a logistic model, learned online as a Gaussian over its few weights (assumed-density
filtering; the update is the extended Kalman filter's for a logistic observation, the averaged
prediction MacKay's, "The evidence framework applied to classification networks", 1992):

    c = sigmoid(place[source, j] + slope[source] * logit(confidence) + own[request])

`place` is the prior that all requests share, `own` what is particular to one request. Both forget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

START = 0.4  # log-odds of a draft nothing is known of: 0.6
PLACE_VARIANCE = 2.0
OWN_VARIANCE = 1.5
SLOPE_VARIANCE = 0.25
MAX_CONFIDENCE = 0.995  # a proposer that says 1.0 means "very sure"
PLACE_MEMORY, OWN_MEMORY = 0.998, 0.95  # share of what is known that outlives an outcome
SLEEP_MEMORY = 0.98  # share of what is known of a request that outlives a step without outcome


def logit(probability: float) -> float:
    """Log-odds, kept finite.

    >>> round(logit(0.5), 3), round(logit(1.0), 2)
    (0.0, 5.29)
    """
    p = min(max(probability, 1.0 - MAX_CONFIDENCE), MAX_CONFIDENCE)
    return math.log(p / (1.0 - p))


def sigmoid(x: float) -> float:
    """The inverse of `logit`, for any x."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


@dataclass(slots=True)
class Weight:
    """One Gaussian weight that forgets towards the value it started from."""

    mean: float
    variance: float
    first_mean: float
    first_variance: float

    @classmethod
    def at(cls, mean: float, variance: float) -> Weight:
        """A weight of which nothing has been seen."""
        return cls(mean, variance, mean, variance)

    def forget(self, memory: float) -> None:
        """Keep a share of what was learned; the rest becomes the start again."""
        kept = memory / self.variance
        again = (1.0 - memory) / self.first_variance
        self.mean = (kept * self.mean + again * self.first_mean) / (kept + again)
        self.variance = 1.0 / (kept + again)


@dataclass(slots=True)
class _Own:
    """What is known of one request, and the step it was last known at."""

    weight: Weight
    step: int


class Acceptance:
    """Chances of all requests; `step` is the controller's count, by which what is old is forgotten."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, bool, int], Weight] = {}
        self._slopes: dict[str, Weight] = {}
        self._own: dict[str, _Own] = {}

    def keep(self, request_ids: set[str]) -> None:
        """Forget all requests but these."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered."""
        return len(self._own)

    def chances(self, request_id: str, source: str, depth: int, step: int) -> list[float]:
        """Before the draw: the conditional chance of drafts 1..depth of a request, from history alone."""
        own, variance = self._belief(request_id, step)
        return [
            _moderated(place.mean + own, place.variance + variance)
            for place in (self._place(source, False, j) for j in range(depth))
        ]

    def chances_of(self, request_id: str, source: str, confidences: Sequence[float], step: int) -> list[float]:
        """After the draw: the same with what the proposer says of its own drafts, one chance a confidence."""
        own, variance = self._belief(request_id, step)
        slope = self._slope(source)
        found = []
        for j, confidence in enumerate(confidences):
            place, x = self._place(source, True, j), logit(confidence)
            mean = place.mean + slope.mean * x + own
            found.append(_moderated(mean, place.variance + slope.variance * x * x + variance))
        return found

    def learn(
        self, request_id: str, source: str, outcomes: Sequence[bool], confidences: Sequence[float], step: int
    ) -> None:
        """Take the outcomes of the judged drafts of one row: right, right, ..., and perhaps one wrong.

        Both models of a place learn, with and without the confidence, so that each is calibrated.
        The request's own weight learns from the one that knows more.
        """
        if not outcomes:
            return
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Own(Weight.at(0.0, OWN_VARIANCE), step)
        own.weight.forget(SLEEP_MEMORY ** min(step - own.step, 1000))
        own.step = step
        aside = Weight.at(own.weight.mean, own.weight.variance) if confidences else own.weight
        for j, right in enumerate(outcomes):
            _update(right, [(self._place(source, False, j), 1.0), (aside, 1.0)])
            if confidences:
                x = logit(confidences[j])
                _update(right, [(self._place(source, True, j), 1.0), (self._slope(source), x), (own.weight, 1.0)])
            self._place(source, False, j).forget(PLACE_MEMORY)
            own.weight.forget(OWN_MEMORY)
        if confidences:
            self._slope(source).forget(PLACE_MEMORY)

    def _belief(self, request_id: str, step: int) -> tuple[float, float]:
        """Mean and variance of a request's own weight, as of this step; nothing is changed."""
        own = self._own.get(request_id)
        if own is None:
            return 0.0, OWN_VARIANCE
        memory = SLEEP_MEMORY ** min(step - own.step, 1000)
        kept, again = memory / own.weight.variance, (1.0 - memory) / OWN_VARIANCE
        return kept * own.weight.mean / (kept + again), 1.0 / (kept + again)

    def _place(self, source: str, is_sure: bool, j: int) -> Weight:
        place = self._places.get((source, is_sure, j))
        if place is None:
            before = self._places.get((source, is_sure, j - 1))  # a new place starts where its neighbour is
            mean = before.mean if before is not None else (0.0 if is_sure else START)
            place = self._places[source, is_sure, j] = Weight.at(mean, PLACE_VARIANCE)
        return place

    def _slope(self, source: str) -> Weight:
        if source not in self._slopes:
            self._slopes[source] = Weight.at(1.0, SLOPE_VARIANCE)
        return self._slopes[source]


def _moderated(mean: float, variance: float) -> float:
    """The mean of a sigmoid of a Gaussian, by MacKay's approximation."""
    return sigmoid(mean / math.sqrt(1.0 + math.pi / 8.0 * variance))


def _update(right: bool, terms: Sequence[tuple[Weight, float]]) -> None:
    """One outcome: each weight moves by its share of the doubt."""
    mean = sum(w.mean * x for w, x in terms)
    variance = sum(w.variance * x * x for w, x in terms)
    chance = _moderated(mean, variance)
    slope = max(chance * (1.0 - chance), 0.01)
    surprise = float(right) - chance
    for w, x in terms:
        gain = w.variance * x / (1.0 + slope * variance)
        w.mean += gain * surprise
        w.variance -= slope * gain * w.variance * x


def running_product(chances: Sequence[float]) -> list[float]:
    """S: the chance that drafts 1..i are all right.

    >>> running_product([0.5, 0.5])
    [0.5, 0.25]
    """
    reached, found = 1.0, []
    for chance in chances:
        reached *= chance
        found.append(reached)
    return found
