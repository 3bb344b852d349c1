"""Acceptance: how likely the target agrees to the j-th draft of a request, where it agreed to those before.

It knows outcomes only: who offered, at which place, how sure it was, and whether it was right. The
chance is a logistic model, learned online as independent Gaussians over its few weights
(assumed-density filtering with the extended Kalman filter's update for a logistic observation; the
averaged prediction is MacKay's, "The evidence framework applied to classification networks", 1992):

    c = sigmoid(place[source, j] + slope[source] * logit(confidence) + own[request, source])

`place` is the prior that all requests share, `own` what is particular to one request. All forget.

A step judges a handful of drafts, for which one Python float at a time is several times quicker than
short arrays; only `cases`, which looks at many drafts that were never made, is written in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, pi, sqrt, tanh
from typing import NamedTuple

import numpy as np

START = 0.4  # log-odds of a draft nothing is known of: 0.6
PLACE_VARIANCE, OWN_VARIANCE, SLOPE_VARIANCE = 0.5, 0.8, 0.1
MAX_CONFIDENCE = 0.995  # a proposer that says 1.0 means "very sure"
PLACE_MEMORY, OWN_MEMORY = 0.995, 0.95  # share of what is known that outlives an outcome
SLEEP_MEMORY = 0.98  # share of what is known of a request that outlives a step without outcome
NUM_CASES = 16  # confidences of past offers that stand for those of the next
SETTLED, SETTLED_EVERY = 64, 4  # after so many steps, what does without confidences learns from one in so many
MOST_BLIND = 256  # answers without confidences that are remembered until the next outcome
MOST_ODDS = 256  # confidences whose log-odds are remembered
MAX_MOVE = 2.0  # of a weight in one step, in log-odds
CERTAIN = 1e6  # log-odds of a forced draft: right whatever else is, so that it says nothing of the others
TINY = 1e-12  # a chance that nothing behind it is asked for
_SHRINK = pi / 8.0  # of MacKay's approximation


class Ask(NamedTuple):
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


class Outcome(NamedTuple):
    """One row's judged drafts: `accepted` right ones, then a wrong one unless all `drafted` were right.

    believed   what `Acceptance.of` said of them, where nothing was learned since; none: it is asked again

    Of drafts that are certain nothing is learned: they say nothing of the guesses beside them.
    """

    request_id: str
    source: str
    drafted: int
    accepted: int
    confidences: tuple[float, ...] = ()
    certain: tuple[bool, ...] = ()
    believed: Sequence[float] = ()


def logit(probability: float) -> float:
    """Log-odds, kept finite."""
    if not 1.0 - MAX_CONFIDENCE < probability < MAX_CONFIDENCE:
        probability = min(max(probability, 1.0 - MAX_CONFIDENCE), MAX_CONFIDENCE)
    return log(probability / (1.0 - probability))


def _moderated(mean: float, variance: float) -> float:
    """The mean of a sigmoid of a Gaussian, by MacKay's approximation."""
    odds = mean / sqrt(1.0 + _SHRINK * variance)
    if not -30.0 < odds < 30.0:
        odds = min(max(odds, -30.0), 30.0)
    return 1.0 / (1.0 + exp(-odds))


def _conditional(mean: float, variance: float, means: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Chances of a row's drafts, each where those before it were right, [depth].

    The request's own weight is as uncertain for one draft as for the next: where the first is right, so will be the
    others more likely. It stands for two values a standard deviation from its mean, half each (Gauss-Hermite's rule of
    two points); what is uncertain of a place is its own.

    mean, variance     of the request's own weight
    means, variances   of the rest, by place
    """
    spread, last, found = sqrt(variance), 1.0, []
    high = low = 0.5
    above, below = mean + spread, mean - spread
    for m, v in zip(means, variances, strict=False):
        scale = 0.5 / sqrt(1.0 + _SHRINK * v)
        high *= 0.5 + 0.5 * tanh((above + m) * scale)
        low *= 0.5 + 0.5 * tanh((below + m) * scale)
        reached = high + low
        found.append(reached / last if last > TINY else 0.0)
        last = reached
    return found


class _Weights:
    """Gaussian weights by place, all starting alike; places never judged read as the last that was."""

    def __init__(self, mean: float, variance: float, size: int) -> None:
        self.first_mean, self.first_variance = mean, variance
        self.mean = [mean] * size
        self.variance = [variance] * size
        self._num_seen = 0

    def widen(self, size: int) -> None:
        """Hold at least so many places."""
        missing = size - len(self.mean)
        if missing > 0:
            self.mean += [self.mean[-1]] * missing
            self.variance += [self.first_variance] * missing

    def learn(self, seen: Sequence[_Evidence]) -> None:
        """Take what was seen at each place."""
        for j, own in enumerate(seen):
            if not own.count:
                continue
            precision = 1.0 / self.variance[j] + own.information
            mean = self.mean[j] + min(max(own.pull / precision, -MAX_MOVE), MAX_MOVE)
            kept = PLACE_MEMORY**own.count
            again = (1.0 - kept) / self.first_variance
            precision *= kept
            self.mean[j] = (precision * mean + again * self.first_mean) / (precision + again)
            self.variance[j] = 1.0 / (precision + again)
            self._num_seen = max(self._num_seen, j + 1)
        if self._num_seen:
            self.mean[self._num_seen :] = [self.mean[self._num_seen - 1]] * (len(self.mean) - self._num_seen)


@dataclass(slots=True)
class _Evidence:
    """What outcomes say of one weight: information (1 / variance), its pull, and how many there were."""

    information: float = 0.0
    pull: float = 0.0
    count: int = 0

    def add(self, surprise: float, slope: float, others: float, x: float = 1.0) -> None:
        """One more outcome; `others` is the variance of what is uncertain besides this weight, x what it is times."""
        rest = 1.0 + slope * others
        self.information += slope * x * x / rest
        self.pull += surprise * x / rest
        self.count += 1


@dataclass(slots=True)
class _Seen:
    """What one step says of the weights that the requests share, of one proposer and model."""

    places: list[_Evidence] = field(default_factory=list)
    slope: _Evidence = field(default_factory=_Evidence)

    def widen(self, size: int) -> None:
        """Hold at least so many places."""
        while len(self.places) < size:
            self.places.append(_Evidence())


class Acceptance:
    """Chances of all requests; `step` is the controller's count, by which what is old is forgotten."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, bool], _Weights] = {}
        self._slopes: dict[str, _Weights] = {}
        self._own: dict[str, dict[str, tuple[float, float, int]]] = {}  # request, source: mean, variance, step
        self._said: dict[str, _Said] = {}
        self._blind: dict[tuple[str, float, float], Sequence[float]] = {}  # until the next outcome
        self._odds: dict[tuple[float, ...], list[float]] = {}  # lookups say the same few things over and over
        self._num_learned = 0

    def keep(self, request_ids: set[str]) -> None:
        """Forget all requests but these."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}

    def forget(self, request_id: str) -> None:
        """A new request goes by this name."""
        self._own.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered."""
        return len(self._own)

    # ------------------------------------------------------------------ asking

    def chances(self, asks: Sequence[Ask], step: int) -> np.ndarray:
        """The conditional chances c, [R, K]; 0 behind a row's depth."""
        found = np.zeros((len(asks), max((ask.depth for ask in asks), default=0)))
        for r, ask in enumerate(asks):
            found[r, : ask.depth] = self.of(ask, step)
        return found

    def of(self, ask: Ask, step: int) -> list[float]:
        """The conditional chances of one row's drafts, [depth]."""
        depth, is_sure = ask.depth, bool(ask.confidences)
        places = self._place(ask.source, is_sure, depth)
        mean, variance = self._belief(ask.request_id, ask.source, step)
        means, variances = places.mean[:depth], places.variance[:depth]
        if is_sure:
            slope = self._slope(ask.source)
            tilt, doubt = slope.mean[0], slope.variance[0]
            said = self._log_odds(ask.confidences, depth)
            means = [m + tilt * x for m, x in zip(means, said, strict=True)]
            variances = [v + doubt * x * x for v, x in zip(variances, said, strict=True)]
        elif not ask.certain:  # most requests at zero are as new as each other
            known = self._blind.get((ask.source, mean, variance), ())
            if len(known) < depth:
                if len(self._blind) >= MOST_BLIND:
                    self._blind.clear()
                known = _conditional(mean, variance, means, variances)
                self._blind[ask.source, mean, variance] = known
            return list(known[:depth])
        for j, is_certain in enumerate(ask.certain[:depth]):
            if is_certain:
                means[j] = CERTAIN
        return _conditional(mean, variance, means, variances)

    def _log_odds(self, confidences: tuple[float, ...], depth: int) -> Sequence[float]:
        """Of what an offer says of its first `depth` drafts; of those it says nothing of 0."""
        known = self._odds.get(confidences)
        if known is None or len(known) < depth:
            if len(self._odds) >= MOST_ODDS:
                self._odds.clear()
            known = [logit(c) for c in confidences]
            known += [0.0] * (depth - len(known))
            self._odds[confidences] = known
        return known if len(known) == depth else known[:depth]

    def note(self, offers: Sequence[Ask]) -> None:
        """Remember what offers said of themselves, the last few of each source: what the next may say."""
        for offer in offers:
            if offer.confidences:
                self._said.setdefault(offer.source, _Said()).add(offer.confidences)

    def cases(
        self, request_ids: Sequence[str], source: str, depth: int, step: int, *, by_confidence: bool = True
    ) -> np.ndarray:
        """Conditional chances of drafts that `source` has not made yet, [R, S, depth]: each row in S cases.

        A case is what an offer of late said of itself, behind its end as at its last place; where none has
        spoken there is one, without.
        """
        own = np.array([self._belief(request_id, source, step) for request_id in request_ids])
        said = self._said.get(source) if by_confidence else None
        places = self._place(source, said is not None, depth)
        mean, variance = np.array([places.mean[:depth]]), np.array([places.variance[:depth]])
        if said is not None:
            x = said.log_odds(depth)
            slope = self._slope(source)
            mean, variance = mean + slope.mean[0] * x, variance + slope.variance[0] * x**2
        spread = np.sqrt(own[:, 1, None, None])
        scale = 0.5 / np.sqrt(1.0 + _SHRINK * variance[None])
        two = [np.tanh((mean[None] + own[:, 0, None, None] + z * spread) * scale) for z in (1.0, -1.0)]
        reached = np.cumprod(0.5 + 0.5 * np.stack(two), axis=-1).sum(axis=0) / 2.0
        found: np.ndarray = reached.copy()
        found[..., 1:] /= np.maximum(reached[..., :-1], TINY)
        return found

    # ------------------------------------------------------------------ learning

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Take the outcomes of one step's rows, one a request.

        Both models of a place learn, with and without the confidence; the request's own weight learns
        from the one that knows more.
        """
        outcomes = [o for o in outcomes if not all(o.certain) or len(o.certain) < o.drafted]
        self._blind.clear()
        self._num_learned += 1
        is_due = self._num_learned <= SETTLED or self._num_learned % SETTLED_EVERY == 0
        learns_blind = is_due or any(not outcome.confidences for outcome in outcomes)
        seen: dict[tuple[str, bool], _Seen] = {}
        for outcome in outcomes:
            is_sure = bool(outcome.confidences)
            if is_sure and learns_blind:
                self._judge(outcome, step, seen.setdefault((outcome.source, False), _Seen()))
            own = self._judge(outcome, step, seen.setdefault((outcome.source, is_sure), _Seen()), is_sure=is_sure)
            self._learn_own(outcome, step, own)
        for (source, is_sure), shared in seen.items():
            self._place(source, is_sure, len(shared.places)).learn(shared.places)
            if is_sure:
                self._slope(source).learn([shared.slope])

    def _judge(self, outcome: Outcome, step: int, seen: _Seen, *, is_sure: bool = False) -> _Evidence:
        """Add what one row says of the shared weights; returns what it says of the request's own."""
        last = min(outcome.accepted + 1, outcome.drafted)
        places = self._place(outcome.source, is_sure, last)
        own_mean, own_variance = self._belief(outcome.request_id, outcome.source, step)
        said: Sequence[float] = ()
        tilt = doubt = 0.0
        if is_sure:
            weights = self._slope(outcome.source)
            tilt, doubt = weights.mean[0], weights.variance[0]
            said = self._log_odds(outcome.confidences, last)
        certain, own = outcome.certain, _Evidence()
        believed = outcome.believed if is_sure == bool(outcome.confidences) else ()
        seen.widen(last)
        for j in range(last):
            if j < len(certain) and certain[j]:
                continue
            x = said[j] if is_sure else 0.0
            place, tilted = places.variance[j], doubt * x * x
            if believed:
                chance = believed[j]
            else:
                chance = _moderated(own_mean + places.mean[j] + tilt * x, own_variance + place + tilted)
            surprise, slope = (j < outcome.accepted) - chance, max(chance * (1.0 - chance), 0.01)
            seen.places[j].add(surprise, slope, own_variance + tilted)
            own.add(surprise, slope, place + tilted)
            if is_sure:
                seen.slope.add(surprise, slope, own_variance + place, x)
        return own

    def _learn_own(self, outcome: Outcome, step: int, seen: _Evidence) -> None:
        """A request's own weight, from its row."""
        if not seen.count:
            return
        mean, variance = self._belief(outcome.request_id, outcome.source, step)
        precision = 1.0 / variance + seen.information
        mean += min(max(seen.pull / precision, -MAX_MOVE), MAX_MOVE)
        kept = OWN_MEMORY**seen.count
        again = (1.0 - kept) / OWN_VARIANCE
        precision *= kept
        known = self._own.setdefault(outcome.request_id, {})
        known[outcome.source] = (precision * mean / (precision + again), 1.0 / (precision + again), step)

    def _belief(self, request_id: str, source: str, step: int) -> tuple[float, float]:
        """Mean and variance of a request's own weight, as of this step; nothing is changed."""
        own = self._own.get(request_id)
        known = own.get(source) if own is not None else None
        if known is None:
            return 0.0, OWN_VARIANCE
        mean, variance, last = known
        if step <= last + 1:
            return mean, variance
        memory = SLEEP_MEMORY ** min(step - last, 1000)
        kept, again = memory / variance, (1.0 - memory) / OWN_VARIANCE
        return kept * mean / (kept + again), 1.0 / (kept + again)

    def _place(self, source: str, is_sure: bool, size: int) -> _Weights:
        weights = self._places.get((source, is_sure))
        if weights is None:
            weights = self._places[source, is_sure] = _Weights(0.0 if is_sure else START, PLACE_VARIANCE, size)
        if len(weights.mean) < size:
            weights.widen(size)
        return weights

    def _slope(self, source: str) -> _Weights:
        if source not in self._slopes:
            self._slopes[source] = _Weights(1.0, SLOPE_VARIANCE, 1)
        return self._slopes[source]


class _Said:
    """What the last few offers of one proposer said of themselves, as log-odds, in a ring of rows."""

    def __init__(self) -> None:
        self._rows = np.zeros((NUM_CASES, 8))
        self._count = 0

    def add(self, confidences: Sequence[float]) -> None:
        """One more; behind its end it reads as at its last place."""
        said = [logit(c) for c in confidences]
        if len(said) > self._rows.shape[1]:
            self._rows = np.pad(self._rows, ((0, 0), (0, len(said) - self._rows.shape[1])), mode="edge")
        row = self._rows[self._count % NUM_CASES]
        row[: len(said)] = said
        row[len(said) :] = said[-1]
        self._count += 1

    def log_odds(self, depth: int) -> np.ndarray:
        """Of the first `depth` drafts of each, [S, depth]."""
        rows = self._rows[: self._count]
        missing = depth - rows.shape[1]
        return rows[:, :depth] if missing <= 0 else np.pad(rows, ((0, 0), (0, missing)), mode="edge")
