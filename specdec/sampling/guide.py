"""The guide: offers meet their grammars before the target sees them.

An offer is cut at the first token its grammar forbids, and what the grammar forces rides behind it: those
tokens cost no guess and are never refused. It knows plans, drafts and matchers; no scores.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.batch import NO_OFFER, Drafts, Offer, Plan, Row
from specdec.request import Grammar, Request

SOURCE = "grammar"
"""The name under which offers that are forced from the first token on are counted."""

MAX_FORCED = 32
"""Most forced tokens that ride in one step."""


class Guide:
    """Rows without a grammar pass untouched.

    most_forced   most forced tokens a row and step; 0: offers are cut only
    """

    def __init__(self, most_forced: int = MAX_FORCED) -> None:
        self.most_forced = most_forced

    def budget(self, request: Request, most: int) -> int:
        """Room for drafts where a controller wants `most`: as much as the forced tokens need, if that is more."""
        if request.grammar is None:
            return most
        limit = self._limit(request)
        return max(most, min(len(request.grammar.forced()), limit)) if limit else most

    def _limit(self, request: Request) -> int:
        """Most forced tokens of this request in a step; its own limit on drafts counts them too."""
        own = request.params.speculative_params
        if not own.enabled:
            return 0
        return min(self.most_forced, MAX_FORCED if own.num_speculative_tokens is None else own.num_speculative_tokens)

    def to_ask(self, plan: Plan) -> Plan:
        """The plan as a proposer should see it: rows that forced tokens fill need no guesses."""
        if not any(self._is_full(row) for row in plan):
            return plan
        return replace(plan, rows=tuple(replace(row, max_drafts=0) if self._is_full(row) else row for row in plan))

    def _is_full(self, row: Row) -> bool:
        grammar = row.request.grammar
        return grammar is not None and 0 < row.max_drafts <= min(len(grammar.forced()), self._limit(row.request))

    def admit(self, plan: Plan, drafts: Drafts) -> Drafts:
        """The offers, each within its grammar."""
        if not any(row.max_drafts and row.request.grammar is not None for row in plan):
            return drafts
        return Drafts(tuple(self._within(row, offer) for row, offer in zip(plan, drafts, strict=True)))

    def _within(self, row: Row, offer: Offer) -> Offer:
        grammar = row.request.grammar
        if grammar is None or not row.max_drafts:
            return offer
        certain = _walk(grammar, offer.token_ids[: row.max_drafts])
        num_legal = len(certain)
        kept = replace(offer.cut(num_legal), certain=certain if any(certain) else ())
        room = min(row.max_drafts - len(kept.token_ids), self._limit(row.request))
        forced = grammar.forced(kept.token_ids)[:room] if room else ()
        if not forced and offer.laws is not None and num_legal < min(len(offer.token_ids), row.max_drafts):
            return replace(kept, laws=offer.laws[: num_legal + 1])  # the forbidden draft counts as rejected
        if not forced:
            return kept if kept.token_ids else NO_OFFER
        is_sure = len(kept.confidences) == len(kept.token_ids)
        sure = kept.confidences + (1.0,) * len(forced) if is_sure else ()
        source = kept.source if kept.token_ids else SOURCE
        return Offer(kept.token_ids + forced, source, sure, kept.laws, certain + (True,) * len(forced))


def _walk(grammar: Grammar, offer: tuple[int, ...]) -> tuple[bool, ...]:
    """One entry for each token that fits the grammar and does not reach beyond its end: True where it is forced."""
    certain: list[bool] = []
    for depth, token_id in enumerate(offer):
        if not grammar.allows(token_id, offer[:depth]) or grammar.completes(offer[:depth]):
            break
        certain.append(not grammar.has_choice(offer[:depth]))
    return tuple(certain)
