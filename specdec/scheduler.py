"""The continuous batcher: who takes part in the next step, and what the step changed.

It plans by token: known tokens minus computed tokens, so prompt chunks, decoding and verification
are one thing. It knows requests, blocks and budgets; it knows no tensors and no models, and
`commit` is the only place in the engine that changes a request.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.batch import Batch, Plan, Row, Verdict
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.logprobs import TokenLogprob
from specdec.request import LEFT_GRAMMAR, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one request gained in a step.

    token_ids      new tokens, at most num_accepted + 1
    num_drafted    drafts that were judged
    num_accepted   how many of token_ids came from the draft
    source         name of the proposer the drafts came from; "" without drafts
    logprobs       one a token, where they were asked for
    """

    request: Request
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()
    source: str = ""


def share_evenly(wanted: Sequence[int], budget: int) -> list[int]:
    """Split a budget so that small wishes are met in full and the others get equal parts.

    >>> share_evenly([8, 1, 4], 9)
    [4, 1, 4]
    >>> share_evenly([5, 5], 3)
    [2, 1]
    """
    if sum(wanted) <= budget:  # nearly always
        return list(wanted)
    granted = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for position, i in enumerate(order):
        granted[i] = min(wanted[i], -(-budget // (len(order) - position)))
        budget -= granted[i]
    return granted


def share_prompts(owed: Sequence[int], budget: int) -> list[int]:
    """Split a budget over prompts in order of arrival: half for the oldest, the rest shortest first.

    The first half keeps a long prompt moving, the second lets short ones overtake it.

    >>> share_prompts([4000, 10, 300], 512)
    [256, 10, 246]
    >>> share_prompts([4000, 10], 512)
    [502, 10]
    """
    if not owed:
        return []
    granted = [0] * len(owed)
    granted[0] = min(owed[0], (budget + 1) // 2)
    budget -= granted[0]
    for i in sorted(range(len(owed)), key=lambda i: (owed[i] - granted[i], i)):
        more = min(owed[i] - granted[i], budget)
        granted[i] += more
        budget -= more
    return granted


JOINS_PER_PROMOTION = 8


def _why(request: Request) -> str:
    """What a row without a token is told."""
    if request.grammar is not None and request.grammar.error:
        return f"{LEFT_GRAMMAR}: {request.grammar.error}"
    rules = request.rules
    if rules.allowed is not None and rules.bans:
        output = request.output_token_ids
        banned = rules.banned(len(output), output[len(output) - min(len(output), rules.longest_bad_word) :])
        if set(rules.allowed.tolist()) <= set(banned.tolist()):
            return "no token could be chosen: bad_words and min_tokens rule out all of allowed_token_ids here"
    return "no token could be chosen: the scores were not finite"


class Scheduler:
    """Waiting and running requests, the token budget, preemption.

    After every JOINS_PER_PROMOTION requests that joined, the one that has waited longest is lifted into the
    best class that waits, so that a steady stream of better classes starves nobody.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.waiting: list[Request] = []  # sorted by arrival
        self.running: list[Request] = []  # sorted by arrival
        self.num_preemptions = 0
        self._joins_until_promotion = JOINS_PER_PROMOTION
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; the door has checked that it can fit when it is alone."""
        request.arrival = next(self._arrivals)
        self._insert(self.waiting, request)

    def abort(self, request_id: str) -> Request | None:
        """End a request between steps, wherever it is; None when it is not here."""
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.request_id == request_id:
                    self._finish(request, FinishReason.ABORT)
                    return request
        return None

    # ------------------------------------------------------------------ planning

    def schedule(self, budget: Callable[[Request], int]) -> Plan:
        """Choose the rows of the next step and reserve their blocks.

        Every running request that decodes gets its one base token; waiting prompts get what is
        left, drafts what prompts leave, but each side at least half where both want more.
        """
        decoding, preempted = self._secure_base_tokens()
        left = self.config.max_num_batched_tokens - len(decoding)
        prompts = [r for r in self.running if r.num_owed_tokens > 1]
        joined = self._admit(left - len(prompts)) if not preempted else []
        prompts += joined
        wanted_drafts = [min(budget(r), r.max_drafts) for r in decoding]
        owed = [r.num_owed_tokens for r in prompts]
        for_prompts = min(sum(owed), max(left - sum(wanted_drafts), (left + 1) // 2))
        chunks = share_prompts(owed, for_prompts)
        drafts = share_evenly(wanted_drafts, left - for_prompts)
        rows = [self._row(r, 1, d) for r, d in zip(decoding, drafts, strict=True)]
        rows += [self._row(r, c, 0) for r, c in zip(prompts, chunks, strict=True) if c]
        return Plan(tuple(rows), tuple(joined), tuple(preempted))

    def _secure_base_tokens(self) -> tuple[list[Request], list[Request]]:
        """Give each decoding request the block of its next token, preempting the latest arrivals if need be."""
        decoding: list[Request] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if request.num_owed_tokens > 1 or (preempted and request in preempted):  # a prompt, or this loop's victim
                continue
            while not self._reserve(request, request.num_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                decoding.append(request)
        return decoding, preempted

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table to hold `num_tokens`; False when the pool cannot."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free_blocks:
            return False
        request.block_table += self.pool.allocate(missing)
        return True

    def _row(self, request: Request, num_base: int, num_drafts: int) -> Row:
        start = request.num_computed_tokens
        while num_drafts and not self._reserve(request, start + num_base + num_drafts):
            num_drafts -= 1
        return Row(request, start, num_base, num_drafts)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_table)
        request.forget_cache()
        request.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._insert(self.waiting, request)

    def _admit(self, most: int) -> list[Request]:
        """Let waiting requests join, first come first served, while their whole prompt fits the pool.

        One more block than the prompt is asked for while others run, so that a newcomer is not
        preempted in its first step.
        """
        admitted: list[Request] = []
        self._promote()
        if most <= 0 or len(self.running) >= self.config.max_num_seqs:  # a long queue is not copied in vain
            return admitted
        for request in list(self.waiting):
            if len(admitted) >= most or len(self.running) >= self.config.max_num_seqs:
                break
            if self._waits_for_leader(request):
                continue
            if not self._join(request):
                break
            admitted.append(request)
            self._joins_until_promotion -= 1
        return admitted

    def _promote(self) -> None:
        """Lift the longest waiting request once enough others have joined."""
        if self._joins_until_promotion > 0 or not self.waiting:
            return
        oldest, best = min(self.waiting, key=lambda r: r.arrival), self.waiting[0].priority
        if oldest.priority > best:
            self.waiting.remove(oldest)
            oldest.priority = best
            self._insert(self.waiting, oldest)
        self._joins_until_promotion = JOINS_PER_PROMOTION

    def _waits_for_leader(self, request: Request) -> bool:
        """True while the first of n choices still computes the prompt whose blocks the others will share."""
        leader = request.leader
        if leader is None or leader.is_finished or not self.pool.enable_prefix_caching:
            return False
        shareable = (request.num_prompt_tokens - 1) // self.pool.block_size * self.pool.block_size
        return leader.num_computed_tokens < shareable

    def _join(self, request: Request) -> bool:
        """Move one waiting request to the running ones, with blocks for all it knows; False where they lack."""
        root = self.pool.root_hash(request.cache_salt)
        hits, hashes = self.pool.match(request.token_ids, root)
        if request.owes_prompt_logprobs:  # a cached position has no scores to tell
            hits, hashes = [], []
        needed = self.pool.blocks_for(request.num_tokens) - len(hits)
        spare = len(self.running) + 1 if self.running else 0
        if needed + spare > self.pool.num_free_blocks - self.pool.num_evictable(hits):
            return False
        self.waiting.remove(request)
        self.pool.hold(hits)
        request.block_table = hits + self.pool.allocate(needed)
        request.block_hashes = hashes
        request.num_computed_tokens = len(hits) * self.pool.block_size
        self._count_hits(request)
        self._insert(self.running, request)
        return True

    def _count_hits(self, request: Request) -> None:
        if request.stats.num_preemptions == 0:  # a resumed request is not a new query
            self.pool.num_queried_tokens += request.num_tokens
            self.pool.num_hit_tokens += request.num_computed_tokens
            request.stats.num_cached_tokens = request.num_computed_tokens

    @staticmethod
    def _insert(queue: list[Request], request: Request) -> None:
        bisect.insort(queue, request, key=lambda r: (r.priority, r.arrival))

    # ------------------------------------------------------------------ the one verb that changes the world

    def commit(self, batch: Batch, verdict: Verdict) -> list[Emitted]:
        """Make a step real: keep verified tokens, forget rejected ones, free what is done."""
        for row, prompt_logprobs in zip(batch, verdict.prompt_logprobs, strict=False):  # none where none are owed
            row.request.prompt_logprobs += prompt_logprobs
        return [self._commit_row(row, verdict, index) for index, row in enumerate(batch)]

    def _commit_row(self, row: Row, verdict: Verdict, index: int) -> Emitted:
        request, token_ids = row.request, verdict.token_ids[index]
        kept = request.extend(list(token_ids))
        logprobs = verdict.logprobs_of(index)[:kept]
        request.logprobs += logprobs
        num_accepted = min(verdict.num_accepted(index), kept)
        num_drafted = len(row.draft_token_ids)
        is_failed = verdict.failed[index]
        if kept < len(token_ids) or is_failed:  # a stop or a failure cut the run: drafts behind it were never judged
            num_drafted = min(num_drafted, kept)
        request.num_computed_tokens = row.end + num_accepted  # the whole of roll-back
        if token_ids:
            request.stats.record(num_drafted, num_accepted, kept)
        if is_failed and not request.is_finished:  # what was kept may have ended it before the scores failed
            request.error, request.finish_reason = _why(request), FinishReason.ERROR
        if not is_failed:  # keys next to scores that failed are not to be shared
            self._register(request)
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)
        else:
            keep = self.pool.blocks_for(request.num_tokens)
            if keep < len(request.block_table):
                self.pool.release(request.block_table[keep:])
                del request.block_table[keep:]
        return Emitted(request, token_ids[:kept], num_drafted, num_accepted, logprobs, row.source)

    def _register(self, request: Request) -> None:
        if not self.pool.enable_prefix_caching:
            return
        full = request.num_computed_tokens // self.pool.block_size
        if full > len(request.block_hashes):
            committed = request.token_ids[: full * self.pool.block_size]
            root = self.pool.root_hash(request.cache_salt)
            self.pool.register(request.block_table, request.block_hashes, committed, root)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.release(request.block_table)
        request.block_table = []

    def fail_all(self, requests: Sequence[Request], message: str) -> None:
        """End requests whose step raised; those that wait go on."""
        for request in requests:
            request.error = message
            self._finish(request, FinishReason.ERROR)

    def check_integrity(self) -> None:
        """Raise unless every block is free, cached or in exactly the tables that count it."""
        self.pool.check_integrity(r.block_table for r in self.running)
        if any(r.block_table for r in self.waiting):
            raise AssertionError("a waiting request holds blocks")
