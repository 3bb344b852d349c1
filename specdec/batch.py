"""The values that flow through one step: Plan -> Drafts -> Batch -> Verdict.

All are frozen and hold integers; none acts. Only `Scheduler.commit` turns them into change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec.logprobs import TokenLogprob
from specdec.request import Request


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    start            first position computed in this step
    num_base         known tokens computed, from `start`
    max_drafts       how many drafts may ride behind them (blocks and budget are reserved)
    draft_token_ids  the drafts that do
    source           name of the proposer they came from; "" without drafts
    """

    request: Request
    start: int
    num_base: int
    max_drafts: int = 0
    draft_token_ids: tuple[int, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_base < 1:
            raise ValueError(f"a row computes at least one token, not {self.num_base}")
        if len(self.draft_token_ids) > self.max_drafts:
            raise ValueError(f"{len(self.draft_token_ids)} drafts in a row with room for {self.max_drafts}")
        if self.max_drafts and not self.chooses:
            raise ValueError("drafts cannot follow a chunk that does not reach the last known token")

    @property
    def end(self) -> int:
        """One past the last base position."""
        return self.start + self.num_base

    @property
    def chooses(self) -> bool:
        """True when the row reaches its last known token, so that the target chooses the next."""
        return self.start + self.num_base == len(self.request.token_ids)

    @property
    def query_len(self) -> int:
        """Tokens of this row in the forward: base tokens and drafts."""
        return self.num_base + len(self.draft_token_ids)

    @property
    def num_choices(self) -> int:
        """Tokens the target chooses: one per draft and one more, or none in a prompt chunk."""
        return len(self.draft_token_ids) + 1 if self.chooses else 0

    @property
    def num_prompt_logits(self) -> int:
        """Prompt tokens of this row whose successor, a prompt token too, owes a log-probability."""
        if self.request.params.prompt_logprobs is None or not self.request.owes_prompt_logprobs:  # nearly always
            return 0
        first = max(self.start, len(self.request.prompt_logprobs) - 1)
        return max(min(self.end, self.request.num_prompt_tokens - 1) - first, 0)

    @property
    def num_logits(self) -> int:
        """Logits rows, the row's last tokens: of the prompt first, then those that choose."""
        return self.num_prompt_logits + self.num_choices

    @property
    def query_token_ids(self) -> list[int]:
        """The tokens this row feeds to the target, [query_len]."""
        base = self.request.token_ids[self.start : self.start + self.num_base]
        return [*base, *self.draft_token_ids] if self.draft_token_ids else base

    def with_drafts(self, draft_token_ids: tuple[int, ...], source: str = "") -> Row:
        """The same row with drafts riding in it."""
        return Row(self.request, self.start, self.num_base, self.max_drafts, draft_token_ids, source)

    def with_room(self, max_drafts: int) -> Row:
        """The same row, without drafts, with room for so many."""
        return self if max_drafts == self.max_drafts else Row(self.request, self.start, self.num_base, max_drafts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the scheduler reserved for this step: rows with room for drafts.

    joined   requests that started to run in this step
    left     requests that were preempted to make room
    """

    rows: tuple[Row, ...]
    joined: tuple[Request, ...] = ()
    left: tuple[Request, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one proposer offers for one row.

    source        the proposer's name
    confidences   its own guess, in [0, 1], that each draft is accepted where those before it are; one a token,
                  or none where it has no opinion
    laws          [n, V] the law each draft was drawn from, a tensor; None: every draft was certain. One law more
                  than drafts says that one more was drawn, and could not ride
    certain       which drafts a grammar forces, so that they cannot be refused; none: no one
    """

    token_ids: tuple[int, ...] = ()
    source: str = ""
    confidences: tuple[float, ...] = ()
    laws: Any = field(default=None, compare=False)
    certain: tuple[bool, ...] = ()

    def cut(self, most: int) -> Offer:
        """Its first `most` drafts."""
        if len(self.token_ids) <= most:
            return self
        laws = None if self.laws is None else self.laws[:most]
        return Offer(self.token_ids[:most], self.source, self.confidences[:most], laws, self.certain[:most])


NO_OFFER = Offer()


@dataclass(frozen=True, slots=True)
class Drafts:
    """The offers for a plan, one for every row in its order; NO_OFFER where there is none."""

    offers: tuple[Offer, ...]

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.offers)

    @classmethod
    def of(cls, token_ids: Iterable[tuple[int, ...]], source: str) -> Drafts:
        """Offers of one proposer that knows no confidences."""
        return cls(tuple(Offer(ids, source) if ids else NO_OFFER for ids in token_ids))

    @classmethod
    def empty(cls, num_rows: int) -> Drafts:
        """No offers."""
        return cls((NO_OFFER,) * num_rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows the target verifies, drafts attached."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, T."""
        return sum(row.query_len for row in self.rows)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of a batch; one entry a row.

    token_ids         accepted drafts and the target's own token behind them; empty for a prompt chunk
    failed            True where no token could be chosen behind token_ids, which then are accepted drafts only
    logprobs          one value a token, or none where not asked for
    prompt_logprobs   of the prompt tokens this step judged, in order
    """

    token_ids: tuple[tuple[int, ...], ...]
    failed: tuple[bool, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()

    def logprobs_of(self, index: int) -> tuple[TokenLogprob, ...]:
        """Of the tokens of row `index`."""
        return self.logprobs[index] if self.logprobs else ()

    def prompt_logprobs_of(self, index: int) -> tuple[TokenLogprob, ...]:
        """Of the prompt tokens of row `index`."""
        return self.prompt_logprobs[index] if self.prompt_logprobs else ()

    def num_accepted(self, index: int) -> int:
        """Drafts of row `index` the target agreed to."""
        return max(len(self.token_ids[index]) - (not self.failed[index]), 0)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where the wall-clock time of a served step went.

    draft    from the plan to the drafts
    verify   packing, the target's forward and reading the verdict
    host     in the controller's own verbs: to prepare and admit, and to observe the step before
    follow   what the proposer did with the verdict, drafting or not
    rest     between this step and the one before: committing and handing out its tokens, planning this one
    """

    draft: float
    verify: float
    host: float = 0.0
    follow: float = 0.0
    rest: float = 0.0
