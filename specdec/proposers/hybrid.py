"""Hybrid: several proposers may make an offer for a row; a policy takes one.

It knows the proposers and the policy, and of each row only how many drafts it has room for. It judges
nothing: what an offer is worth, and whether a model shall be asked at all, is the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.proposers.base import OfferPolicy, Proposer
from specdec.request import Request


class HybridProposer:
    """Free proposers are always heard; the one that costs a forward drafts only where the policy wants it.

    free     proposers that cost no forward
    costly   one that does, or None; it is told of every row, with no room for drafts where it is not wanted,
             so that it can keep up, and hears every verdict, also on drafts that are not its own (Row.source)
    """

    name = "hybrid"
    max_draft_position: int | None = None

    def __init__(self, free: Sequence[Proposer], costly: Proposer | None, policy: OfferPolicy) -> None:
        self.free = tuple(free)
        self.costly = costly
        self.policy = policy
        self._all = self.free if costly is None else (*self.free, costly)

    def start(self, request: Request) -> None:
        """Tell all."""
        for proposer in self._all:
            proposer.start(request)

    def propose(self, plan: Plan) -> Drafts:
        """The free offers first, then those of the model for rows that want them."""
        offered = [proposer.propose(plan).offers for proposer in self.free]
        best = [self._best(row, [offers[i] for offers in offered]) for i, row in enumerate(plan)]
        if self.costly is not None:
            rows = self._asking(plan.rows, best)
            costly = self.costly.propose(Plan(tuple(rows), plan.joined, plan.left)).offers
            best = [self._best(row, (free, own)) for row, free, own in zip(plan, best, costly, strict=True)]
        return Drafts(tuple(best))

    def _best(self, row: Row, offers: Sequence[Offer]) -> Offer:
        """The policy's choice among those that hold something."""
        full = [offer for offer in offers if offer.token_ids]
        if len(full) < 2:
            return full[0] if full else NO_OFFER
        return full[self.policy.choose(row, full)]

    def _asking(self, rows: Sequence[Row], free: Sequence[Offer]) -> list[Row]:
        """The rows as the model shall see them: with room for what the policy wants of it."""
        able = [row.with_room(self._model_room(row)) for row in rows]
        wanted = self.policy.model_depths(able, free)
        return [row.with_room(max(min(depth, row.max_drafts), 0)) for row, depth in zip(able, wanted, strict=True)]

    def _model_room(self, row: Row) -> int:
        """The row's room within the model's length."""
        last = self.costly.max_draft_position if self.costly is not None else None
        return row.max_drafts if last is None else max(min(row.max_drafts, last - row.request.num_tokens), 0)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """All hear the verdict."""
        for proposer in self._all:
            proposer.observe(batch, verdict, features)

    def stop(self, request: Request) -> None:
        """Tell all."""
        for proposer in self._all:
            proposer.stop(request)
