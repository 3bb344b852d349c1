"""Verification: which drafts the target agrees to, and what it says behind them.

A draft is accepted while it equals the token the target itself chooses at that position, so the
output is plain seeded sampling whatever was proposed. It knows batches and scores, nothing of models.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from specdec.batch import Batch, Row, Verdict
from specdec.logprobs import TokenLogprob
from specdec.sampling.choice import Choice
from specdec.sampling.logprobs import describe, describe_chosen
from specdec.sampling.sampler import choose, judge


def verify(batch: Batch, logits: Tensor) -> Verdict:
    """Judge every row's drafts at once.

    logits   [L, V]   L = sum of row.num_logits; row i of a run saw the drafts before it
    """
    prompt_logprobs, logits = _judge_prompts(batch, logits)
    choices = [choice for row in batch for choice in _choices(row)]
    token_ids, failed = _judge(batch, logits, choices)
    places = [0, *accumulate(row.num_choices for row in batch)]
    logprobs = _logprobs(batch, logits, choices, token_ids, places)
    return Verdict(tuple(token_ids), tuple(failed), logprobs, prompt_logprobs)


def _judge(batch: Batch, logits: Tensor, choices: list[Choice]) -> tuple[list[tuple[int, ...]], list[bool]]:
    """What every row keeps, and whether its scores failed: on the device where it can, else here."""
    on_device = judge(logits, choices, [row.draft_token_ids for row in batch if row.num_choices])
    if on_device is not None:
        kept, failed = iter(on_device[0]), iter(on_device[1])
        return [next(kept) if r.num_choices else () for r in batch], [r.num_choices > 0 and next(failed) for r in batch]
    chosen, is_finite = choose(logits, choices)
    token_ids: list[tuple[int, ...]] = []
    has_failed: list[bool] = []
    place = 0
    for row in batch:
        span = slice(place, place + row.num_choices)
        token_ids.append(_agreed(row, chosen[span]))
        has_failed.append(not all(is_finite[span][: len(token_ids[-1])]))
        place += row.num_choices
    return token_ids, has_failed


def _choices(row: Row) -> list[Choice]:
    drafts = row.draft_token_ids
    return [Choice(row.request, row.request.num_output_tokens + i, drafts[:i]) for i in range(row.num_choices)]


def _agreed(row: Row, chosen: list[int]) -> tuple[int, ...]:
    """The target's own tokens up to and including the first that differs from its draft."""
    for j, draft in enumerate(row.draft_token_ids):
        if chosen[j] != draft:
            return tuple(chosen[: j + 1])
    return tuple(chosen)


def _logprobs(
    batch: Batch, logits: Tensor, choices: list[Choice], token_ids: list[tuple[int, ...]], places: list[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Reports on the kept tokens of the rows that ask; no work where none does."""
    asking = [i for i, row in enumerate(batch) if row.request.params.logprobs is not None]
    if not asking:
        return ()
    wanted = [places[i] + j for i in asking for j in range(len(token_ids[i]))]
    kept = [token_id for i in asking for token_id in token_ids[i]]
    index = torch.tensor(wanted, dtype=torch.int64, device=logits.device)
    reports = iter(describe_chosen(logits[index], [choices[i] for i in wanted], kept))
    asked = set(asking)
    return tuple(tuple(next(reports) for _ in ids) if i in asked else () for i, ids in enumerate(token_ids))


def _judge_prompts(batch: Batch, logits: Tensor) -> tuple[tuple[tuple[TokenLogprob, ...], ...], Tensor]:
    """Reports on prompt tokens, and the logits of the rows that choose."""
    sizes = [row.num_prompt_logits for row in batch]
    if not any(sizes):
        return (), logits
    starts = [0, *accumulate(row.num_logits for row in batch)]
    reports: list[tuple[TokenLogprob, ...]] = []
    for row, size, start in zip(batch, sizes, starts, strict=False):
        request = row.request
        known = len(request.prompt_logprobs)
        tokens = request.token_ids[known : known + size]
        num_top = request.params.prompt_logprobs or 0
        reports.append(tuple(describe(logits[start : start + size], tokens, num_top)) if size else ())
    chooses = [
        start + size + j for row, size, start in zip(batch, sizes, starts, strict=False) for j in range(row.num_choices)
    ]
    return tuple(reports), logits[torch.tensor(chooses, dtype=torch.int64, device=logits.device)]
