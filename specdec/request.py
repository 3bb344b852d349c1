"""Request: the arithmetic of one request, in integers and text; no tensors, no devices.

A request knows its tokens, how many of them the target has computed, which blocks hold them and
when it is over. It does not know other requests, the pool or the models.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.logprobs import TokenLogprob
from specdec.rules import Rules
from specdec.sampling_params import SamplingParams

LEFT_GRAMMAR = "the output left the grammar's limits"
"""How the error of a request begins whose own grammar ended it."""


class FinishReason(str, enum.Enum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StopMatcher(Protocol):
    """Watches the text of one request for stop strings."""

    def push(self, token_id: int) -> bool:
        """Take one more token; True when a stop string is complete."""
        ...


class Grammar(Protocol):
    """One request's place in its grammar; walks over drafts and comes back."""

    error: str
    """Why it can no longer be followed; "" while it can."""

    def push(self, token_id: int) -> bool:
        """Commit one more token; True when the output is complete."""
        ...

    def mask(self, drafts: Sequence[int] = ()) -> NDArray[np.uint8]:
        """What may come behind these drafts, one bit a token id."""
        ...

    def allows(self, token_id: int, drafts: Sequence[int]) -> bool:
        """True where this token may come behind these drafts."""
        ...

    def has_choice(self, drafts: Sequence[int]) -> bool:
        """True where more than one token may come behind these drafts."""
        ...

    def completes(self, drafts: Sequence[int]) -> bool:
        """True where these drafts complete the output."""
        ...

    def forced(self, drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that must come behind these drafts."""
        ...


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request; only emitted tokens are counted.

    num_steps            target steps that emitted tokens
    num_drafts           those of them that carried drafts
    num_emitted          tokens emitted by those steps
    num_draft_tokens     drafts that were judged (a draft behind a stop never is)
    num_accepted_tokens  drafts that were judged right
    accepted_per_pos     how often the j-th draft of a step was accepted
    """

    num_steps: int = 0
    num_emitted: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafted_per_pos: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per target step, the recovered or bonus token included."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted, in [0, 1]; 0 before anything was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def add(self, other: RequestStats) -> None:
        """Count another request's steps as well."""
        for name in ("num_steps", "num_emitted", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_preemptions += other.num_preemptions
        self.num_cached_tokens += other.num_cached_tokens
        self._widen(len(other.drafted_per_pos))
        for j, (drafted, accepted) in enumerate(zip(other.drafted_per_pos, other.accepted_per_pos, strict=True)):
            self.drafted_per_pos[j] += drafted
            self.accepted_per_pos[j] += accepted

    def _widen(self, num_positions: int) -> None:
        missing = num_positions - len(self.drafted_per_pos)
        if missing > 0:
            self.drafted_per_pos += [0] * missing
            self.accepted_per_pos += [0] * missing

    def record(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one step of the request."""
        self.num_steps += 1
        self.num_emitted += num_emitted
        self.num_drafts += num_drafted > 0
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self._widen(num_drafted)
        for j in range(num_drafted):
            self.drafted_per_pos[j] += 1
            self.accepted_per_pos[j] += j < num_accepted


class Request:
    """One sequence to be continued.

    token_ids            prompt and output, in one list
    num_computed_tokens  how many of them the target's cache holds
    block_table          block i holds positions i * block_size ...
    noise_seed           64 bits; with the output position it fixes the noise of every choice
    max_output_tokens    resolved from max_tokens, the model length and the pool
    priority             lower runs first and is preempted last
    cache_salt           requests share cached blocks only where their salts are equal
    owner                who asked, as the server knows them; past outputs help only those of the same owner and salt
    grammar              what the output must match, and how far it does; None: anything
    leader               the first of n choices; the others wait for its prompt and share its blocks
    rules                what the parameters mean for token ids
    logprobs             one value for each emitted token, where they were asked for
    prompt_logprobs      one for each prompt token the target has judged; None for the first, which follows nothing
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        noise_seed: int = 0,
        max_output_tokens: int = 16,
        stop_token_ids: frozenset[int] = frozenset(),
        stop_matcher: StopMatcher | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.noise_seed = noise_seed
        self.max_output_tokens = max_output_tokens
        self.stop_token_ids = stop_token_ids
        self.stop_matcher = stop_matcher
        self.grammar: Grammar | None = None
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.arrival = 0
        self.priority = params.priority or 0
        self.leader: Request | None = None
        self.cache_salt: str | None = None
        self.owner: str | None = None
        self.stats = RequestStats()
        self.rules = Rules.of(params, stop_token_ids)
        self.counts = self.rules.counts(prompt_token_ids)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the emitted tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_owed_tokens(self) -> int:
        """Tokens the target still owes this request: all it knows, less all it has cached.

        >>> r = Request("r", [0] * 7, SamplingParams())
        >>> r.num_owed_tokens           # a new prompt
        7
        >>> r.num_computed_tokens = 7; r.token_ids.append(1)
        >>> r.num_owed_tokens           # decode
        1
        >>> r.num_computed_tokens = 0
        >>> r.num_owed_tokens           # after preemption
        8
        """
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """True once a finish reason is set."""
        return self.finish_reason is not None

    @property
    def max_drafts(self) -> int:
        """Most drafts that can still be emitted: one place of the budget belongs to the target's own token."""
        return max(self.max_output_tokens - len(self.token_ids) + self.num_prompt_tokens - 1, 0)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """True while prompt tokens wait for the log-probabilities that were asked for."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def extend(self, token_ids: list[int]) -> int:
        """Append tokens up to the earliest end of the request; return how many were kept.

        The order of events at one token: EOS or stop id, stop string, the end of the grammar, length. A stop id comes
        before min_tokens only where a grammar leaves nothing else; then it is a token like others.
        """
        if self._only_grows(token_ids):
            self.token_ids += token_ids
            return len(token_ids)
        for kept, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if self.counts is not None:
                self.counts.add(token_id)
            is_complete = self.grammar is not None and self.grammar.push(token_id)
            if self.grammar is not None and self.grammar.error:
                self.error = f"{LEFT_GRAMMAR}: {self.grammar.error}"
                self.finish_reason = FinishReason.ERROR
                return kept
            is_stopped = token_id in self.stop_token_ids and self.num_output_tokens >= self.rules.min_tokens
            if is_stopped or (self.stop_matcher is not None and self.stop_matcher.push(token_id)) or is_complete:
                self.finish_reason = FinishReason.STOP
            elif self.num_output_tokens >= self.max_output_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                return kept
        return len(token_ids)

    def _only_grows(self, token_ids: list[int]) -> bool:
        """True where no event can come in these tokens and nothing counts them: nearly always."""
        if self.counts is not None or self.grammar is not None or self.stop_matcher is not None:
            return False
        room = self.max_output_tokens - self.num_output_tokens
        return len(token_ids) < room and self.stop_token_ids.isdisjoint(token_ids)

    def forget_cache(self) -> None:
        """Start over without blocks; tokens, noise position and stop state stay (preemption)."""
        self.num_computed_tokens = 0
        self.block_table = []
