"""Suffix lookup: what followed the longest earlier occurrence of the request's end, with how sure that is.

It looks into the request's own text and, where a store is given, into past outputs of the same owner.
It needs no model and no cache, and decides nothing about cost.
(Suffix decoding: Oliaro et al. 2024, arXiv 2411.04975.)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable

from torch import Tensor

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.proposers.base import expected_accepted
from specdec.proposers.confidence import confidence
from specdec.proposers.occurrences import END, MAX_MATCH, Match, Occurrences
from specdec.proposers.past_outputs import PastOutputs
from specdec.request import FinishReason, Request

OWN_DEPTHS = (1, 2, 4, 8, 16)
PROMPT_TAIL = 16
"""Tokens of the prompt kept in front of a remembered output, so that its first tokens can be found."""


def follow(text: array[int], match: Match, most: int, *, wraps: bool = False) -> tuple[list[int], list[float]]:
    """What the matched places went on with, most frequent first, and the confidence of every token.

    wraps   the text is the request's own: where it ends, the match repeats itself, so the offer does too

    Places that went on otherwise drop out token by token; of equally frequent ones the latest counts.
    """
    places = list(match.places)
    tokens: list[int] = []
    confidences: list[float] = []
    for j in range(most):
        nexts = [text[p + (j % (len(text) - p) if wraps else j)] for p in places]
        token, agreeing = Counter(nexts).most_common(1)[0]
        if token == END:
            break
        tokens.append(token)
        confidences.append(confidence(match.length + j, agreeing, len(places)))
        places = [p for p, t in zip(places, nexts, strict=True) if t == token]
    return tokens, confidences


class SuffixProposer:
    """Offers the continuation of the longest match, for any tokenizer and any target.

    shortest   least tokens that must match in the request's own text
    store      past outputs to look into as well; None: the request alone
    """

    name = "suffix"
    max_draft_position: int | None = None

    def __init__(self, shortest: int = 2, store: PastOutputs | None = None) -> None:
        self.store = store
        self._depths = sorted({shortest, *(d for d in OWN_DEPTHS if d > shortest)})
        self._own: dict[str, Occurrences] = {}

    def start(self, request: Request) -> None:
        """Begin an index; it is filled when the first offer is asked for."""
        self._own[request.request_id] = Occurrences(self._depths)

    def propose(self, plan: Plan) -> Drafts:
        """Look every row with room up."""
        return Drafts(tuple(self._offer(row) if row.max_drafts else NO_OFFER for row in plan))

    def _offer(self, row: Row) -> Offer:
        request, most = row.request, row.max_drafts
        own = self._own[request.request_id]
        own.extend(request.token_ids[len(own) :])
        tail = own.text[-MAX_MATCH:]
        found = []
        if (match := own.find(tail)) is not None:
            found.append(follow(own.text, match, most, wraps=True))
        for part in self.store.parts(owner_of(request)) if self.store is not None else ():
            if (match := part.find(tail)) is not None:
                found.append(follow(part.text, match, most))
        offers = [Offer(tuple(tokens), self.name, tuple(sure)) for tokens, sure in found if tokens]
        return max(offers, key=expected_accepted, default=NO_OFFER)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """The index reads committed tokens when it is next asked."""

    def stop(self, request: Request) -> None:
        """Forget the request; remember what it said, where there is a store and it came to its end."""
        self._own.pop(request.request_id, None)
        if self.store is not None and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            start = max(request.num_prompt_tokens - PROMPT_TAIL, 0)
            self.store.add(owner_of(request), request.token_ids[start:])


def owner_of(request: Request) -> Hashable:
    """Whose past outputs a request may look into: those of the same key and the same salt."""
    return request.owner, request.cache_salt
