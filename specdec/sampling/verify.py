"""Verification: which drafts the target agrees to, and what it says behind them.

A draft is accepted while it equals the token the target itself chooses at that position, so the
output is plain seeded sampling whatever was proposed. It knows batches and scores, nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specdec.batch import Batch, Drafts, Row, Verdict
from specdec.logprobs import TokenLogprob
from specdec.sampling.choice import Choice
from specdec.sampling.logprobs import describe, describe_chosen
from specdec.sampling.rejection import Case, judge
from specdec.sampling.sampler import can_judge_on_device, choose, choose_plain, judge_on_device

_NONE: Mapping[int, tuple[int, ...]] = {}


def verify(batch: Batch, logits: Tensor, drafts: Drafts | None = None) -> Verdict:
    """Judge every row's drafts at once.

    logits   [L, V]   L = sum of row.num_logits; row i of a run saw the drafts before it
    drafts   the offers the rows' drafts come from; where they tell the law of their draws, rejection judges
    """
    prompt_logprobs, logits = _judge_prompts(batch, logits)
    if drafts is None or all(offer.laws is None for offer in drafts):
        found = choose_plain(logits, [(row.request, row.num_choices) for row in batch])
        if found is not None:
            return Verdict(*_kept(batch, *found), (), prompt_logprobs)
    choices: list[Choice] = []
    places: list[int] = []
    for row in batch:
        places.append(len(choices))
        choices += _choices(row)
    judged = _judged(batch, drafts, places)
    done = _judged_on_device(batch, logits, choices) if not judged and can_judge_on_device(logits, choices) else None
    if done is not None:
        return Verdict(done, (False,) * len(batch), _logprobs(batch, logits, choices, done, places), prompt_logprobs)
    chosen, is_finite = choose(logits, choices)
    kept = dict(zip(judged, judge(list(judged.values()), logits, choices), strict=True)) if judged else {}
    token_ids, failed = _kept(batch, chosen, is_finite, kept)
    return Verdict(token_ids, failed, _logprobs(batch, logits, choices, token_ids, places), prompt_logprobs)


def _kept(
    batch: Batch, chosen: list[int], is_finite: list[bool], judged: Mapping[int, tuple[int, ...]] = _NONE
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """What every row keeps of the tokens chosen for it, and whether its scores failed behind them.

    judged   rows whose drafts were judged otherwise, by number
    """
    token_ids: list[tuple[int, ...]] = []
    failed: list[bool] = []
    is_sound, place = all(is_finite), 0
    for index, row in enumerate(batch):
        end = place + row.num_choices
        agreed = judged[index] if index in judged else _agreed(row, chosen[place:end])
        sound = len(agreed) if is_sound else _num_sound(is_finite[place : place + len(agreed)])
        token_ids.append(agreed[:sound])
        failed.append(sound < len(agreed))
        place = end
    return tuple(token_ids), tuple(failed)


def _num_sound(is_finite: list[bool]) -> int:
    """How many tokens were chosen before scores failed: plain decoding would have emitted those."""
    return is_finite.index(False) if False in is_finite else len(is_finite)


def _judged_on_device(batch: Batch, logits: Tensor, choices: list[Choice]) -> tuple[tuple[int, ...], ...] | None:
    """What every row keeps, where the device can say it at once."""
    found = judge_on_device(logits, choices, [row.draft_token_ids for row in batch if row.chooses])
    if found is None:
        return None
    rows = iter(found)
    return tuple(next(rows) if row.chooses else () for row in batch)


def _judged(batch: Batch, drafts: Drafts | None, places: list[int]) -> dict[int, Case]:
    """The rows that rejection judges, by number; a request without noise needs no law."""
    if drafts is None:
        return {}
    cases: dict[int, Case] = {}
    for index, (row, offer, place) in enumerate(zip(batch, drafts, places, strict=True)):
        if offer.laws is None or not row.chooses or row.request.params.is_greedy:
            continue
        size = len(row.draft_token_ids)
        laws = offer.laws if size == len(offer.token_ids) else offer.laws[:size]
        if len(laws):
            cases[index] = Case(row, place, laws)
    return cases


def _choices(row: Row) -> list[Choice]:
    drafts = row.draft_token_ids
    if not drafts:  # nearly every row of plain decoding
        return [Choice(row.request, row.request.num_output_tokens)] if row.chooses else []
    return [Choice(row.request, row.request.num_output_tokens + i, drafts[:i]) for i in range(row.num_choices)]


def _agreed(row: Row, chosen: list[int]) -> tuple[int, ...]:
    """The target's own tokens up to and including the first that differs from its draft."""
    for j, draft in enumerate(row.draft_token_ids):
        if chosen[j] != draft:
            return tuple(chosen[: j + 1])
    return tuple(chosen)


def _logprobs(
    batch: Batch, logits: Tensor, choices: list[Choice], token_ids: Sequence[tuple[int, ...]], places: list[int]
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
    if all(row.request.params.prompt_logprobs is None for row in batch):  # nearly always
        return (), logits
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
