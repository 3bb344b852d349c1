"""A feature draft proposes: a small head that reads what the target's layers computed (EAGLE-3).

It knows its runner, how far each request's pairs are written, and the feature that the next pair waits for. Pairs
are written on every target step, drafting or not, for requests that never draft too: cached blocks are complete,
so acceptance is the same after a prefix hit, a prompt chunk, a preemption or a pause. It does not judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, Verdict
from specdec.block_pool import BlockPool
from specdec.models.eagle_runner import EagleRunner
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling import Choice, choose


@dataclass(slots=True)
class _Progress:
    """How far one request is.

    num_ready   positions whose pairs hold true features, from the front; position 0 has no pair and counts
    feature     [width] of position num_ready - 1 when the request last ran; None: nothing was computed yet
    is_lost     a cached block came without its pairs: no drafts until the request starts over
    """

    num_ready: int = 0
    feature: Tensor | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Span:
    """What a target step computed for a row and the verdict left standing.

    place   where its features begin among all that were kept
    """

    row: Row
    progress: _Progress
    length: int
    place: int

    @property
    def end(self) -> int:
        return self.row.start + self.length


class EagleProposer:
    """Drafts from the target's features, all tokens of a greedy row in one call.

    shares_noise   rows that sample are drafted with the target's own noise; else with the likeliest tokens, which
                   are certain and so can be judged by rejection (the noise would be used twice)
    """

    name = "eagle"
    max_draft_position: int | None = None

    def __init__(self, runner: EagleRunner, target: ModelRunner, pool: BlockPool, *, shares_noise: bool = True) -> None:
        self.runner = runner
        self.pool = pool
        self.shares_noise = shares_noise
        self._progress: dict[str, _Progress] = {}
        target.capture(runner.head.config.feature_layer_ids)

    def start(self, request: Request) -> None:
        """Take over what cached blocks hold: their pairs, and the feature behind the last of them."""
        size, ready = self.pool.block_size, self.pool.draft_ready
        blocks = request.block_table[: request.num_computed_tokens // size]
        progress = _Progress(num_ready=len(blocks) * size)
        if blocks:
            progress.feature = self.runner.last_features[blocks[-1]].clone()
            progress.is_lost = any(ready[block] < size for block in blocks)
        self._progress[request.request_id] = progress

    def stop(self, request: Request) -> None:
        """Forget the request; its blocks keep their pairs."""
        self._progress.pop(request.request_id, None)

    # ------------------------------------------------------------------ drafting

    def propose(self, plan: Plan) -> Drafts:
        """Draft for every row with room whose next pair is complete."""
        rows = sorted((row for row in plan if self._can_draft(row)), key=lambda row: -row.max_drafts)
        greedy: list[Row] = []
        others: list[Row] = []
        for row in rows:
            (greedy if not self.shares_noise or _is_greedy(row) else others).append(row)
        offers: dict[str, Offer] = {}
        for group, make in ((greedy, self._draft_greedy), (others, self._draft_by_step)):
            if group:
                made = zip(group, make(group), strict=True)
                offers |= {row.request.request_id: offer for row, offer in made}
        for row in rows:
            self._progress[row.request.request_id].num_ready = row.start + 1
        return Drafts(tuple(offers.get(row.request.request_id, NO_OFFER) for row in plan))

    def _can_draft(self, row: Row) -> bool:
        progress = self._progress[row.request.request_id]
        is_next = progress.feature is not None and progress.num_ready == row.start
        return row.max_drafts > 0 and row.num_base == 1 and is_next and not progress.is_lost

    def _draft_greedy(self, rows: Sequence[Row]) -> list[Offer]:
        """Every draft of every row in one call."""
        depth = rows[0].max_drafts
        num_active = [sum(row.max_drafts > s for row in rows) for s in range(depth)]
        made = self.runner.draft(self.runner.pack([_base(row) for row in rows]), self._features(rows), num_active)
        token_ids, confidences = made.token_ids.tolist(), made.confidences.tolist()
        return [
            Offer(tuple(ids[: row.max_drafts]), self.name, tuple(shares[: row.max_drafts]))
            for row, ids, shares in zip(rows, token_ids, confidences, strict=True)
        ]

    def _draft_by_step(self, rows: Sequence[Row]) -> list[Offer]:
        """One call a draft, for rows whose sampling rule must be asked between drafts."""
        batch, features = self.runner.pack([_base(row) for row in rows]), self._features(rows)
        latest = [row.request.token_ids[-1] for row in rows]
        ids: list[tuple[int, ...]] = [() for _ in rows]
        shares: list[tuple[float, ...]] = [() for _ in rows]
        for step in range(rows[0].max_drafts):
            active = [row for row in rows if row.max_drafts > step]
            scores, features = self.runner.scores(batch, step, features, latest[: len(active)])
            latest, confidences = self._choose(scores, active, ids)
            for i, pair in enumerate(zip(latest, confidences, strict=True)):
                ids[i], shares[i] = (*ids[i], pair[0]), (*shares[i], pair[1])
        return [Offer(own, self.name, certain) for own, certain in zip(ids, shares, strict=True)]

    def _choose(
        self, logits: Tensor, rows: Sequence[Row], before: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[float]]:
        """The head's scores [N, Vd] under each row's own rule and noise: target ids and the head's probabilities.

        Where the rule leaves nothing of the draft vocabulary the id is 0, a wrong guess.
        """
        head = self.runner.head
        scores = logits.new_full((len(rows), head.vocab_size), float("-inf")).index_copy_(1, head.target_ids, logits)
        choices = [
            Choice(row.request, row.request.num_output_tokens + len(ids), ids)
            for row, ids in zip(rows, before, strict=False)
        ]
        token_ids, _ = choose(scores, choices)
        picked = scores.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])[:, 0]
        return token_ids, (picked - logits.logsumexp(1)).exp().tolist()

    def _features(self, rows: Sequence[Row]) -> Tensor:
        kept = [self._progress[row.request.request_id].feature for row in rows]
        return torch.stack([feature for feature in kept if feature is not None])

    # ------------------------------------------------------------------ keeping up

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """Write the pairs of what the target computed and the verdict left standing; remember the last feature."""
        if features is None:
            return
        spans, kept = self._spans(batch, verdict)
        if not spans:
            return
        fused = self.runner.fuse(_rows_of(features, kept))
        self._write_pairs(spans, fused)
        self._keep_block_ends(spans, fused)
        last = _rows_of(fused, [span.place + span.length - 1 for span in spans])
        for span, feature in zip(spans, last, strict=True):
            span.progress.num_ready, span.progress.feature = span.end, feature
            self.pool.note_draft(span.row.request.block_table, span.row.start, span.end)

    def _spans(self, batch: Batch, verdict: Verdict) -> tuple[list[_Span], list[int]]:
        """Rows whose pairs can be written, and the places in the batch of the features they keep."""
        spans: list[_Span] = []
        kept: list[int] = []
        place = 0
        for index, row in enumerate(batch):
            progress = self._progress[row.request.request_id]
            progress.is_lost |= progress.num_ready < row.start
            length = row.num_base + verdict.num_accepted(index)
            if not (progress.is_lost or verdict.failed[index]):
                spans.append(_Span(row, progress, length, len(kept)))
                kept.extend(range(place, place + length))
            place += row.query_len
        return spans, kept

    def _write_pairs(self, spans: Sequence[_Span], fused: Tensor) -> None:
        """The pair of position t takes the feature of t - 1: of this step, or the one remembered from the last."""
        segments: list[Segment] = []
        sources: list[int] = []
        remembered: list[Tensor] = []
        for span in spans:
            row, known = span.row, span.progress
            first = max(known.num_ready, row.start, 1)
            if first == row.start:
                assert known.feature is not None
                sources.append(len(fused) + len(remembered))
                remembered.append(known.feature)
            sources.extend(range(span.place + max(first, row.start + 1) - row.start - 1, span.place + span.length - 1))
            if first < span.end:
                tokens = row.query_token_ids[first - row.start : span.length]
                segments.append(Segment(tokens, first, row.request.block_table, 0))
        if segments:
            every = torch.cat([fused, torch.stack(remembered)]) if remembered else fused
            self.runner.keep(segments, _rows_of(every, sources))

    def _keep_block_ends(self, spans: Sequence[_Span], fused: Tensor) -> None:
        """The feature of a full block's last position stays with the block: a prefix hit goes on from there."""
        size = self.pool.block_size
        ends = [
            (span.row.request.block_table[p // size], span.place + p - span.row.start)
            for span in spans
            for p in range(span.row.start + (-span.row.start - 1) % size, span.end, size)
        ]
        if ends:
            blocks, places = (torch.tensor(column) for column in zip(*ends, strict=True))
            self.runner.last_features[blocks] = fused[places].to(self.runner.last_features.dtype)


def _base(row: Row) -> Segment:
    """The row's last known token."""
    return Segment(row.query_token_ids, row.start, row.request.block_table, 0)


def _rows_of(x: Tensor, places: list[int]) -> Tensor:
    """Some rows of x [T, ...]; x itself where those are all of them in order."""
    if len(places) == len(x) and places == list(range(len(x))):
        return x
    return x[torch.tensor(places, device=x.device)]


def _is_greedy(row: Row) -> bool:
    """True where every draft is simply the likeliest token."""
    request = row.request
    first = request.num_output_tokens
    return request.params.is_greedy and not any(request.rules.edits(first + j) for j in range(row.max_drafts))
