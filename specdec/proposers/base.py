"""What every proposer is: it offers draft tokens for the rows of a plan, and hears what became of them.

A proposer may hold state per request; it never changes a request. Being wrong costs time, never
correctness: the target decides every token.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdec.batch import Batch, Drafts, Plan, Verdict
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
