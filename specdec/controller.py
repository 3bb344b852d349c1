"""The controller: how deep each row may draft, and which drafts are worth verifying.

Here is what the engine asks of one, and the plain kind, whose lengths are fixed: the engine's, or
less where the request or the draft's own length says so. The kind that adapts lives in `control/`.
It knows requests and offers, in integers; it knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.batch import Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.trace import Totals
from specdec.request import Request


class Controller(Protocol):
    """The seam between the engine and any rule for draft lengths; called in this order each step."""

    @property
    def totals(self) -> Totals | None:
        """Sums over the steps, for the metrics; None where nothing is decided."""
        ...

    def prepare(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """A step is about to be planned."""
        ...

    def budget(self, request: Request) -> int:
        """Most drafts for this request in the next step."""
        ...

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """Attach the offers that shall be verified."""
        ...

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Hear what became of them and what the step took, before it is committed."""
        ...


class FixedLength:
    """The same draft length for every row and step.

    num_speculative_tokens   most drafts a row and step
    max_draft_position       positions at or behind it cannot be drafted for; None: no limit
    """

    totals: Totals | None = None

    def __init__(self, num_speculative_tokens: int, max_draft_position: int | None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_draft_position = max_draft_position

    def prepare(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Fixed lengths do not depend on others."""

    def budget(self, request: Request) -> int:
        """Most drafts for this request in the next step."""
        own = request.params.speculative_params
        if not own.enabled:
            return 0
        most = self.num_speculative_tokens
        if own.num_speculative_tokens is not None:
            most = min(most, own.num_speculative_tokens)
        if self.max_draft_position is not None:
            most = min(most, self.max_draft_position - request.num_tokens)
        return max(most, 0)

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """Verify everything that was offered."""
        return Batch(tuple(attach(row, offer) for row, offer in zip(plan, drafts, strict=True)))

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Fixed lengths learn nothing."""


def attach(row: Row, offer: Offer) -> Row:
    """The row with as much of the offer as it has room for."""
    return row.with_drafts(offer.token_ids[: row.max_drafts], offer.source) if offer.token_ids else row
