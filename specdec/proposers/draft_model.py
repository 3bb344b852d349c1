"""A second, smaller model of the same tokenizer proposes, over the same blocks as the target.

It knows its runner, how far each request is computed in the draft's own part of the blocks, and
the requests' sampling rule (it draws with the target's noise,
or under rejection with one of its own). It does not judge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.block_pool import BlockPool
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling import Choice, choose
from specdec.sampling.rejection import draw

MAX_LAG = 16
"""Tokens a row that does not draft may be behind, for as long as no row drafts."""


class DraftModelProposer:
    """Runs the draft ahead of the target, k tokens for every row that has room.

    tells_laws     draw by a noise of its own and tell the law of every draft, for judging by rejection
    max_catch_up   most tokens a step may spend on bringing lagging rows up to date
    vocab_size     ids the target can verify; a padded draft vocabulary is cut to it, and ids of a padded
                   target vocabulary that the draft lacks read as id 0 (a worse guess, never a fault)
    """

    name = "draft_model"

    def __init__(
        self, runner: ModelRunner, pool: BlockPool, *, vocab_size: int, max_catch_up: int, tells_laws: bool = False
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.vocab_size = min(vocab_size, runner.model.vocab_size)
        self.max_catch_up = max_catch_up
        self.max_draft_position: int | None = runner.model.max_model_len
        self.tells_laws = tells_laws
        self._num_computed: dict[str, int] = {}
        self._offers: dict[str, list[int]] = {}
        self._laws: dict[str, list[Tensor]] = {}

    def start(self, request: Request) -> None:
        """Trust what cached blocks say of the draft's part, from the front until the first gap."""
        ready = 0
        for block in request.block_table[: request.num_computed_tokens // self.pool.block_size]:
            ready += self.pool.draft_ready[block]
            if self.pool.draft_ready[block] < self.pool.block_size:
                break
        self._num_computed[request.request_id] = ready

    def stop(self, request: Request) -> None:
        """Forget the request; its blocks keep what they say of the draft's part."""
        self._num_computed.pop(request.request_id, None)

    def propose(self, plan: Plan) -> Drafts:
        """Catch up with what the target computes in this step, then draft where a row has room."""
        offers = self._offers = {}
        self._laws = {}
        rows = self._catch_up(plan, offers) if self._must_run(plan) else []
        depth = 1
        while rows:
            rows = [row for row in rows if row.max_drafts > depth]
            self._draft(rows, [[offers[row.request.request_id][-1]] for row in rows], offers)
            depth += 1
        return Drafts(tuple(self._offer(row.request.request_id) for row in plan))

    def _offer(self, request_id: str) -> Offer:
        if request_id not in self._offers:
            return NO_OFFER
        laws = torch.stack(self._laws[request_id]) if self.tells_laws else None
        return Offer(tuple(self._offers[request_id]), self.name, laws=laws)

    def _must_run(self, plan: Plan) -> bool:
        """A forward is saved while no row may draft and none lags far; what lags is caught up later in one."""
        return any(row.max_drafts or self._reach(row) - self._computed_of(row) > MAX_LAG for row in plan)

    def _reach(self, row: Row) -> int:
        """Up to where the draft shall follow this row; as far as it is where it shall not."""
        if not row.request.params.speculative_params.enabled:
            return self._computed_of(row)
        return min(row.end, self.runner.model.max_model_len)

    def _computed_of(self, row: Row) -> int:
        return self._num_computed[row.request.request_id]

    def _catch_up(self, plan: Plan, offers: dict[str, list[int]]) -> list[Row]:
        """Compute known tokens the draft lacks, within the step's allowance; return rows that drafted."""
        allowance = self.max_catch_up
        segments: list[Segment] = []
        ready: list[Row] = []
        for row in plan:
            request = row.request
            start = self._computed_of(row)
            end = min(self._reach(row), start + allowance)
            if end <= start:
                continue
            allowance -= end - start
            drafts_now = row.max_drafts > 0 and end == row.end
            tokens = [t if t < self.runner.model.vocab_size else 0 for t in request.token_ids[start:end]]
            segments.append(Segment(tokens, start, request.block_table, int(drafts_now)))
            self._num_computed[request.request_id] = end
            if drafts_now:
                ready.append(row)
        self._run(segments, ready, offers)
        return ready

    def _draft(self, rows: Sequence[Row], last: list[list[int]], offers: dict[str, list[int]]) -> None:
        """One more token for each of these rows."""
        segments = []
        for row, tokens in zip(rows, last, strict=True):
            start = self._num_computed[row.request.request_id]
            segments.append(Segment(tokens, start, row.request.block_table, 1))
            self._num_computed[row.request.request_id] = start + 1
        self._run(segments, rows, offers)

    def _run(self, segments: list[Segment], rows: Sequence[Row], offers: dict[str, list[int]]) -> None:
        if not segments:
            return
        logits = self.runner.forward(self.runner.pack(segments))[:, : self.vocab_size]
        choices = []
        for row in rows:
            offer = offers.setdefault(row.request.request_id, [])
            choices.append(Choice(row.request, row.request.num_output_tokens + len(offer), tuple(offer)))
        if self.tells_laws:
            token_ids, laws = draw(logits, choices)
            for row, law in zip(rows, laws, strict=True):
                self._laws.setdefault(row.request.request_id, []).append(law)
        else:
            token_ids, _ = choose(logits, choices)
        for row, token_id in zip(rows, token_ids, strict=True):
            offers[row.request.request_id].append(token_id)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """Roll back to what the target agreed to, and write down which slots hold it.

        The drafts that were verified may be another proposer's or a grammar's: what counts is the draft's own tokens.
        """
        for index, row in enumerate(batch):
            request = row.request
            agreed = _agreement(self._offers.get(request.request_id, ()), verdict.token_ids[index])
            agreed = min(agreed, verdict.num_accepted(index))  # the token behind them is not computed yet
            computed = min(self._num_computed[request.request_id], row.end + agreed)
            self._num_computed[request.request_id] = computed
            self.pool.note_draft(request.block_table, row.start, computed)


def _agreement(offered: Sequence[int], verdict: Sequence[int]) -> int:
    """How many tokens from the front are the same."""
    n = 0
    while n < min(len(offered), len(verdict)) and offered[n] == verdict[n]:
        n += 1
    return n
