"""Beliefs: what is thought of the offers of one step, each worked out once, and how often there are any.

It knows rows, offers and the acceptance model; it knows no costs and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specdec.batch import Batch, Offer, Row, Verdict
from specdec.control.acceptance import Acceptance, Ask, Outcome

HEARD_MEMORY = 0.98  # share of what is known of all requests' offers that outlives a look
OWN_MEMORY = 0.9  # of one request's
BEFORE_STEPS = 8  # what is thought of a request before its offers are known may be so old
PRIOR_LOOKS = 4.0  # looks that the others' share stands for, where a request's own is asked for


def reached(chances: Sequence[float]) -> list[float]:
    """S(1), S(2), ...: the chances that the first drafts are all right.

    >>> reached([0.5, 0.5])
    [0.5, 0.25]
    """
    return list(accumulate(chances, mul))


class Beliefs:
    """Chances of the offers of a step.

    looks      False: what an offer says of itself may not be used
    admitted   by request: the offer from which this step's drafts are, and the chances of those that were kept
    """

    def __init__(self, acceptance: Acceptance, *, looks: bool) -> None:
        self.acceptance = acceptance
        self.looks = looks
        self._step = 0
        self._known: dict[int, tuple[Offer, str, list[float]]] = {}
        self._before: dict[str, tuple[int, list[float]]] = {}  # until which step, and S
        self.admitted: dict[str, tuple[Offer, list[float]]] = {}

    def before(
        self, request_id: str, most: int, sources: Sequence[str], step: int, *, keeps: bool = False
    ) -> list[float]:
        """S of a request's next drafts before there is an offer, by the proposer from which most is expected.

        keeps   a few steps old will do: offers will speak for themselves
        """
        if keeps and (known := self._before.get(request_id)) is not None:
            until, ladder = known
            if step < until and most <= len(ladder):
                return ladder if most == len(ladder) else ladder[:most]
        asks = (Ask(request_id, source, most) for source in sources)
        found = max((reached(self.acceptance.of(ask, step)) for ask in asks), key=sum)
        if keeps:
            self._before[request_id] = (step + BEFORE_STEPS, found)
        return found

    def forget(self, request_id: str) -> None:
        """A new request goes by this name."""
        self._before.pop(request_id, None)

    def keep(self, request_ids: set[str]) -> None:
        """Forget all requests but these."""
        self._before = {request_id: own for request_id, own in self._before.items() if request_id in request_ids}

    def of(self, row: Row, offer: Offer, step: int) -> list[float]:
        """The conditional chances of as much of an offer as its row has room for."""
        if step != self._step:
            self._step = step
            self._known.clear()
        most = min(len(offer.token_ids), row.max_drafts)
        known = self._known.get(id(offer))
        request_id = row.request.request_id
        if known is None or known[1] != request_id or len(known[2]) < most:
            chances = self.acceptance.of(self.ask(row, offer), step)
            self._known[id(offer)] = (offer, request_id, chances)
            return chances
        return known[2] if len(known[2]) == most else known[2][:most]

    def expected(self, row: Row, offer: Offer, step: int) -> float:
        """Drafts of an offer that will be accepted."""
        return sum(reached(self.of(row, offer, step)))

    def ask(self, row: Row, offer: Offer) -> Ask:
        """The offer in the acceptance model's terms."""
        most = min(len(offer.token_ids), row.max_drafts)
        confidences = offer.confidences[:most] if self.looks else ()
        return Ask(row.request.request_id, offer.source, most, confidences, offer.certain[:most])

    def outcomes(self, batch: Batch, verdict: Verdict) -> list[Outcome]:
        """What became of the drafts that were admitted, row by row; of a row that failed nothing is known."""
        found = []
        for index, row in enumerate(batch):
            drafted = len(row.draft_token_ids)
            if drafted and not verdict.failed[index]:
                request_id, accepted = row.request.request_id, verdict.num_accepted(index)
                offer, believed = self.admitted[request_id]
                said = offer.confidences[:drafted], offer.certain[:drafted], believed
                found.append(Outcome(request_id, row.source, drafted, accepted, *said))
        return found


class Heard:
    """How often the free proposers have something to say when they are asked."""

    def __init__(self) -> None:
        self._all = [PRIOR_LOOKS, PRIOR_LOOKS]  # offers, looks; both forget
        self._own: dict[str, list[float]] = {}

    def note(self, rows: Sequence[Row], offers: Sequence[Offer]) -> None:
        """Look at what was offered to each row with room."""
        for row, offer in zip(rows, offers, strict=True):
            if row.max_drafts:
                spoke = bool(offer.token_ids)
                own = self._own.setdefault(row.request.request_id, [0.0, 0.0])
                for counts, memory in ((own, OWN_MEMORY), (self._all, HEARD_MEMORY)):
                    counts[0] = memory * counts[0] + spoke
                    counts[1] = memory * counts[1] + 1.0

    def share(self, request_id: str) -> float:
        """Steps in which a request is offered something, of those in which it could be."""
        offers, looks = self._all
        own_offers, own_looks = self._own.get(request_id, (0.0, 0.0))
        return (own_offers + PRIOR_LOOKS * offers / looks) / (own_looks + PRIOR_LOOKS)

    def keep(self, request_ids: set[str]) -> None:
        """Forget all requests but these."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}

    def forget(self, request_id: str) -> None:
        """A new request goes by this name."""
        self._own.pop(request_id, None)
