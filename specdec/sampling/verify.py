"""Verification: which drafts the target agrees to, and what it says behind them.

A draft is accepted while it equals the token the target itself chooses at that position, so the
output is plain seeded sampling whatever was proposed. It knows batches and scores, nothing of models.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch import Batch, Row, Verdict
from specdec.sampling.sampler import Choice, choose


def verify(batch: Batch, logits: Tensor) -> Verdict:
    """Judge every row's drafts at once.

    logits   [L, V]   L = sum of row.num_choices; row i of a run saw the drafts before it
    """
    choices = [
        Choice(row.request, row.request.num_output_tokens + offset)
        for row in batch
        for offset in range(row.num_choices)
    ]
    chosen, is_finite = choose(logits, choices)
    token_ids: list[tuple[int, ...]] = []
    failed: list[bool] = []
    place = 0
    for row in batch:
        span = slice(place, place + row.num_choices)
        place += row.num_choices
        kept = _agreed(row, chosen[span])
        token_ids.append(kept)
        failed.append(not all(is_finite[span][: len(kept)]))
    return Verdict(tuple(token_ids), tuple(failed))


def _agreed(row: Row, chosen: list[int]) -> tuple[int, ...]:
    """The target's own tokens up to and including the first that differs from its draft."""
    for j, draft in enumerate(row.draft_token_ids):
        if chosen[j] != draft:
            return tuple(chosen[: j + 1])
    return tuple(chosen)
