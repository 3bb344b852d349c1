"""What every proposer is: it offers draft tokens for the rows of a plan, and hears what became of them.

A proposer may hold state per request; it never changes a request. Being wrong costs time, never
correctness: the target decides every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.batch import Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.request import Request


class Proposer(Protocol):
    """The seam between the engine and any way of guessing."""

    name: str
    """What its offers are called in counts and metrics."""

    max_draft_position: int | None
    """Positions at or behind this cannot be drafted for (a draft model's own length); None: no limit."""

    def start(self, request: Request) -> None:
        """A request joined the running ones; its blocks may come from the prefix cache."""
        ...

    def propose(self, plan: Plan) -> Drafts:
        """Offer at most row.max_drafts tokens for every row."""
        ...

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """Hear the verdict, before it is committed.

        features  [T, F] what the runner was asked to keep of this forward, in the batch's token order; or None
        """
        ...

    def stop(self, request: Request) -> None:
        """A request left the running ones: finished, aborted or preempted."""
        ...


class NoDrafts:
    """Speculation off: nothing is proposed, so every verification is an ordinary decode."""

    name = "none"
    max_draft_position: int | None = 0

    def start(self, request: Request) -> None:
        """Nothing to prepare."""

    def propose(self, plan: Plan) -> Drafts:
        """No offers."""
        return Drafts.empty(len(plan))

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """Nothing to learn."""

    def stop(self, request: Request) -> None:
        """Nothing to forget."""


class OfferPolicy(Protocol):
    """Decides between proposers that may all make an offer for the same row; the controller can be one."""

    def choose(self, row: Row, offers: Sequence[Offer]) -> int:
        """Which offer is taken: an index of `offers`, in the order of the proposers, none of them empty."""
        ...

    def model_depths(self, rows: Sequence[Row], free: Sequence[Offer]) -> Sequence[int]:
        """How many drafts to ask of the proposer that costs a forward, of each row at most max_drafts; 0: none.

        free   of each row the offer taken of those that cost nothing; NO_OFFER where there is none
        """
        ...


UNKNOWN_CONFIDENCE = 0.6
"""What a draft is taken to be worth where its proposer has no opinion."""


def expected_accepted(offer: Offer) -> float:
    """Drafts the target is expected to accept: c1 + c1 c2 + ..., from the offer's own confidences.

    >>> expected_accepted(Offer((7, 8), "suffix", (0.5, 0.5)))
    0.75
    """
    total, reached = 0.0, 1.0
    for confidence in offer.confidences or (UNKNOWN_CONFIDENCE,) * len(offer.token_ids):
        reached *= confidence
        total += reached
    return total


class MostExpected:
    """The policy without a controller: most accepted drafts by the offers' own confidences.

    free_is_enough   a free offer from which as many accepted drafts are expected saves the model's pass
    """

    def __init__(self, free_is_enough: float = 1.0) -> None:
        self.free_is_enough = free_is_enough

    def choose(self, row: Row, offers: Sequence[Offer]) -> int:
        """The offer that promises most; the earlier one of equals."""
        return max(range(len(offers)), key=lambda i: expected_accepted(offers[i]))

    def model_depths(self, rows: Sequence[Row], free: Sequence[Offer]) -> list[int]:
        """All the room of each row, unless its free offer is enough."""
        is_enough = [expected_accepted(offer) >= self.free_is_enough for offer in free]
        return [0 if enough else row.max_drafts for row, enough in zip(rows, is_enough, strict=True)]
