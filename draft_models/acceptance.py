"""Acceptance: how far drafts agree with a text, from a table of agreements; it knows no model.

agree[i, s] says whether the draft made from the text before position i guesses token i + s, given that it
guessed the s tokens before it. With a target that decides alone what is emitted, walking this table gives
exactly what an engine with that draft would accept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of draft steps.

    steps      target steps that had a draft
    accepted   [k] steps in which at least 1, 2, ... drafts were accepted
    """

    steps: int
    accepted: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Emitted tokens per target step, with the recovered or bonus token."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else float("nan")

    def conditional(self) -> list[float]:
        """Acceptance of the j-th draft given that all before it were accepted."""
        before = (self.steps, *self.accepted[:-1])
        return [a / b if b else float("nan") for a, b in zip(self.accepted, before, strict=True)]

    def length_at(self, k: int) -> float:
        """Mean acceptance length, had only k tokens been drafted at the same positions."""
        return 1.0 + sum(self.accepted[:k]) / self.steps if self.steps else float("nan")

    @staticmethod
    def total(parts: Iterable[Tally]) -> Tally:
        """The sum of several tallies of the same k."""
        kept = list(parts)
        width = max((len(p.accepted) for p in kept), default=0)
        accepted = tuple(sum(p.accepted[j] for p in kept) for j in range(width))
        return Tally(sum(p.steps for p in kept), accepted)


def run_lengths(agree: Tensor) -> Tensor:
    """Accepted drafts at every position: the leading agreements of each row of agree [N, k]."""
    return agree.to(torch.int64).cumprod(dim=1).sum(dim=1)


def walk(lengths: Sequence[int], k: int) -> Tally:
    """Decode over the text as an engine would: a step at position i emits lengths[i] + 1 tokens.

    Of the last tokens a request may emit one is the target's own, so no draft is made for its place.
    """
    accepted, steps, at = [0] * k, 0, 0
    while at < len(lengths):
        run = min(lengths[at], k, len(lengths) - at - 1)
        for j in range(run):
            accepted[j] += 1
        steps += 1
        at += run + 1
    return Tally(steps, tuple(accepted))


@dataclass(frozen=True, slots=True)
class Shared:
    """A draft beside n-gram lookup, which has the word wherever it has an offer.

    alone      n-gram lookup without the draft: steps without an offer accept nothing
    hybrid     both
    without    the draft's own steps in that decode: those without an n-gram offer
    """

    alone: Tally
    hybrid: Tally
    without: Tally


def walk_beside(draft: Sequence[int], ngram: Sequence[int], k: int) -> Shared:
    """Decode over the text with both; ngram[i] is -1 where lookup has nothing to offer."""
    both = [d if n < 0 else n for d, n in zip(draft, ngram, strict=True)]
    accepted, steps, at = [0] * k, 0, 0
    while at < len(both):
        run = min(both[at], k, len(both) - at - 1)
        if ngram[at] < 0:
            steps += 1
            for j in range(run):
                accepted[j] += 1
        at += run + 1
    return Shared(walk([max(n, 0) for n in ngram], k), walk(both, k), Tally(steps, tuple(accepted)))
