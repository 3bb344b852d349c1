"""Step cost: what a step takes by its parts: the target's forward, the draft's passes, the host beside them.

It knows sizes and seconds; it knows no requests' history and decides nothing. The host counts because it is
not free: what looking offers up, weighing them and learning from them takes is paid in every step that may draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.batch import Row, StepSeconds
from specdec.control.cost import ForwardCost
from specdec.control.load import Load

FORGETS = 0.05  # weight of one step in the averages of the host's seconds
OUTLIER = 4.0  # times the average: what counts at most
FIRST = 4


class Average:
    """A mean that forgets. The first few steps pay for caches that are cold: of those the least counts."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """One more."""
        self._count += 1
        if self._count <= FIRST:
            self.value = value if self._count == 1 else min(self.value, value)
        else:
            self.value += max(FORGETS, 1.0 / self._count) * (min(value, OUTLIER * self.value) - self.value)


class StepCost:
    """Seconds of a step.

    verify    of the target's forwards
    draft     of the draft's passes; None: no model drafts
    looking   before the target's forward, where rows may draft and no model does
    follow    what the proposer does with every verdict, drafting or not (a head keeps its cache complete)
    """

    def __init__(self, verify: ForwardCost, draft: ForwardCost | None = None) -> None:
        self.verify = verify
        self.draft = draft
        self.looking, self.follow = Average(), Average()
        self._rest_on, self._rest_off = Average(), Average()
        self._host_on, self._host_off = Average(), Average()

    @property
    def overhead(self) -> float:
        """What the host takes more in a step that may draft than in one that may not, models not counted."""
        host = self._host_on.value - self._host_off.value
        return self.looking.value + max(host, 0.0) + max(self._rest_on.value - self.rest, 0.0)

    @property
    def rest(self) -> float:
        """Between two steps that may not draft. Every step pays it once, so drafts that are right save it."""
        return self._rest_off.value or self._rest_on.value

    def verifying(self, load: Load, most: int) -> list[float]:
        """Of decoding with 0..most drafts, [most + 1]: alone, and what drafts add beside the prompts.

        What follows is included, and what lies between two steps.
        """
        verify, spent = self.judging(load, most)
        return [seconds + spent for seconds in verify]

    def judging(self, load: Load, most: int) -> tuple[list[float], float]:
        """The same in two parts: the forward's by drafts, [most + 1], and what is the same for any number of them."""
        base = load.decoding + load.prompts
        spent = self.verify.seconds(load.decoding, load.keys) - self.verify.at(base)
        return self.verify.span(base, base + most), spent + self.follow.value + self.rest

    def drafting(self, rows: int) -> list[float] | None:
        """Of one pass over 0..rows rows; None where drafting is free."""
        return None if self.draft is None else self.draft.span(0, rows)

    def passes(self, sizes: Sequence[int]) -> float:
        """Of draft passes over so many tokens each."""
        return sum(self.draft.at(n) for n in sizes) if self.draft is not None else 0.0

    def hear_host(self, seconds: StepSeconds, *, is_on: bool, has_passes: bool) -> None:
        """Average what the host took in a step that might draft (`is_on`), or might not."""
        if not is_on:
            self._host_off.add(seconds.host)
            return
        self._host_on.add(seconds.host)
        if not has_passes:
            self.looking.add(seconds.draft)

    def hear_rest(self, rest: float, *, is_on: bool) -> None:
        """Average what lay between a step and the one before, where that is known."""
        if rest:
            (self._rest_on if is_on else self._rest_off).add(rest)

    def observe(self, tokens: int, load: Load, passes: Sequence[int], seconds: StepSeconds) -> float:
        """Learn from a served step; returns the seconds of drafting and verifying that were expected."""
        predicted = self.verify.seconds(tokens, load.keys, load.prompts)
        self.verify.observe([tokens], seconds.verify, load.keys, load.prompts)
        self.follow.add(seconds.follow)
        if passes and self.draft is not None:
            looking = self.looking.value
            predicted += looking + self.passes(passes)
            self.draft.observe(passes, max(seconds.draft - looking, 0.25 * seconds.draft))
        return predicted


def pass_sizes(rows: Sequence[Row], asked: Mapping[str, int], lags: Mapping[str, int]) -> list[int]:
    """Tokens of each pass of a model that drafts, where `asked` says how deep, request by request."""
    if not asked:
        return []
    depths = [asked.get(row.request.request_id, 0) if row.max_drafts else 0 for row in rows]
    first = sum(
        (lags.get(row.request.request_id, 1) if row.chooses else row.num_base)
        for row, depth in zip(rows, depths, strict=True)
        if depth or row.num_base > 1
    )
    return [first, *(sum(depth > j for depth in depths) for j in range(1, max(depths, default=0)))]
