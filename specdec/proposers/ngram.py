"""N-gram lookup: the tokens that followed the latest earlier occurrence of the request's last few tokens.

It knows one request's own tokens and nothing else; it needs no model and no cache.
(Prompt lookup decoding: Saxena 2023.)
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.config import MAX_SPECULATIVE_TOKENS
from specdec.proposers.confidence import confidence
from specdec.request import Request

LONGER = 8
"""The longest size stands for every longer match; by how much they are longer on average, tokens."""


class _Index:
    """Where each n-gram of one request last ended, kept up in O(sizes) a token.

    ends[n]   n-gram -> position just behind its latest occurrence that has a successor
    """

    def __init__(self, sizes: range) -> None:
        self.sizes = sizes
        self.num_indexed = 0
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}

    def extend(self, tokens: list[int]) -> None:
        """Index every n-gram that ends before the last token."""
        for n, ends in self.ends.items():
            for end in range(max(self.num_indexed, n), len(tokens)):
                ends[tuple(tokens[end - n : end])] = end
        self.num_indexed = len(tokens)

    def lookup(self, tokens: list[int], most: int) -> tuple[tuple[int, ...], int]:
        """What followed the longest known suffix, and its size; shorter ones only where longer ones are new."""
        for n in reversed(self.sizes):
            if n < len(tokens):
                end = self.ends[n].get(tuple(tokens[-n:]))
                if end is not None:
                    return _continue(tokens, end, most), n
        return (), 0


def _continue(tokens: list[int], start: int, most: int) -> tuple[int, ...]:
    """`most` tokens from `start`; where the text ends the match repeats itself, so the offer does too."""
    period = len(tokens) - start
    if most <= period:
        return tuple(tokens[start : start + most])
    return tuple(tokens[start + i % period] for i in range(most))


class NgramProposer:
    """Offers the continuation of the latest match, for any tokenizer and any target."""

    name = "ngram"
    max_draft_position: int | None = None

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(shortest, longest + 1)
        self._indices: dict[str, _Index] = {}
        lengths = {n: n if n < longest else n + LONGER for n in self.sizes}
        self._sure = {n: tuple(confidence(m + j) for j in range(MAX_SPECULATIVE_TOKENS)) for n, m in lengths.items()}

    def start(self, request: Request) -> None:
        """Begin an index; it is filled when the first offer is asked for."""
        self._indices.setdefault(request.request_id, _Index(self.sizes))

    def propose(self, plan: Plan) -> Drafts:
        """Look every row with room up."""
        return Drafts(tuple(self._offer(row) if row.max_drafts else NO_OFFER for row in plan))

    def _offer(self, row: Row) -> Offer:
        index = self._indices[row.request.request_id]
        index.extend(row.request.token_ids)
        tokens, size = index.lookup(row.request.token_ids, row.max_drafts)
        return Offer(tokens, self.name, self._sure[size][: len(tokens)]) if tokens else NO_OFFER

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """The index reads committed tokens when it is next asked."""

    def stop(self, request: Request) -> None:
        """Forget the request."""
        self._indices.pop(request.request_id, None)
