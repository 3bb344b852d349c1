"""Log-probabilities of chosen tokens and of the likeliest at their places.

It knows rows of scores and which tokens to report on; it chooses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.logprobs import TokenLogprob
from specdec.sampling.choice import Choice
from specdec.sampling.likeliest import Likeliest, at_least, group_maxima, kth_bound, row_sums
from specdec.sampling.sampler import blocks, process, take


@torch.inference_mode()
def describe_chosen(logits: Tensor, choices: Sequence[Choice], token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Report on the tokens that were chosen: logits [L, V] of the model, choices and token_ids [L].

    By the model's own law, or where a request asks for it by the law the token was drawn from.
    """
    reports: list[TokenLogprob] = []
    for block in blocks(logits, range(len(choices))):
        scores = _wide(take(logits, block))
        processed = [i for i in block if choices[i].request.params.logprobs_mode == "processed_logprobs"]
        if processed:
            index = torch.tensor([i - block[0] for i in processed], device=logits.device)
            scores = scores.index_copy(0, index, process(scores[index], [choices[i] for i in processed]))
        sizes = [choices[i].request.params.logprobs or 0 for i in block]
        reports += _describe(scores, [token_ids[i] for i in block], sizes)
    return reports


@torch.inference_mode()
def describe(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Report on given tokens by the model's own law: logits [L, V], token_ids [L]."""
    reports: list[TokenLogprob] = []
    for block in blocks(logits, range(len(token_ids))):
        scores = _wide(take(logits, block))
        reports += _describe(scores, [token_ids[i] for i in block], [num_top] * len(block))
    return reports


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _describe(scores: Tensor, token_ids: list[int], sizes: list[int]) -> list[TokenLogprob]:
    """Reports on a block of rows: log softmax of scores [R, V]."""
    maxima = group_maxima(scores)
    largest = maxima.amax(dim=1, keepdim=True)
    normaliser = torch.log(row_sums(torch.exp(scores - largest)))[:, None]
    own = scores.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])
    ranks = (scores > own).sum(dim=1).tolist()
    offset = largest + normaliser  # one number for both, so that a token has one log-probability
    logprobs = (own - offset)[:, 0].tolist()
    tops = _tops(scores, maxima, offset, sizes)
    return [
        TokenLogprob(token_id, _finite(logprob), rank + 1, top)
        for token_id, logprob, rank, top in zip(token_ids, logprobs, ranks, tops, strict=True)
    ]


def _tops(scores: Tensor, maxima: Tensor, offset: Tensor, sizes: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """The sizes[i] likeliest tokens of row i and their log-probabilities: offset [R, 1] makes scores into those."""
    if not any(sizes):
        return [()] * len(sizes)
    count = torch.tensor(sizes, device=scores.device).clamp(1, scores.shape[1])
    bound = kth_bound(scores, maxima, count)
    found: Likeliest = at_least(scores, maxima, bound)
    size = max(sizes)
    ids = found.ids[:, :size].tolist()
    logprobs = (found.scores - offset)[:, :size].tolist()
    lengths = torch.minimum(found.counts, count).tolist()
    tops = []
    for row, length in enumerate(lengths):
        kept = range(length if sizes[row] else 0)
        tops.append(tuple((ids[row][i], logprobs[row][i]) for i in kept if math.isfinite(logprobs[row][i])))
    return tops


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
