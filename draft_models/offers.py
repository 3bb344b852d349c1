"""Offers: where n-gram lookup has something to propose for a text, and how far it would be right.

It asks the engine's own n-gram proposer, position by position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draft_models.features import Sample
from specdec.batch import Plan, Row
from specdec.proposers.ngram import NgramProposer
from specdec.request import Request
from specdec.sampling_params import SamplingParams


def ngram_runs(sample: Sample, k: int, shortest: int = 2, longest: int = 4) -> Tensor:
    """For every predicting row: -1 where there is no offer, else the leading tokens of it that are right; [rows]."""
    ids = sample.ids.tolist()
    proposer = NgramProposer(shortest, longest)
    first = max(sample.answer_start, 1)
    request = Request("text", ids[: first + 1], SamplingParams())
    proposer.start(request)
    runs = []
    for known in range(first + 1, len(ids)):
        [offer] = proposer.propose(Plan((Row(request, known - 1, 1, max_drafts=k),)))
        runs.append(leading(offer.token_ids, ids[known : known + k]) if offer.token_ids else -1)
        request.token_ids.append(ids[known])
    return torch.tensor(runs, dtype=torch.int64)


def leading(offer: tuple[int, ...], truth: list[int]) -> int:
    """How many tokens of an offer are right before the first that is not."""
    count = 0
    for guess, token in zip(offer, truth, strict=False):
        if guess != token:
            break
        count += 1
    return count
