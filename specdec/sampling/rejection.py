"""Classical rejection sampling: drafts drawn from a known law, judged so that the target's law comes out.

It knows the laws of drafts and targets, each after all processors of its request, and where a request's independent
noises lie; `kernels.accept.reject` tosses and draws. No noise is shared between draft and target, so the output depends
on which positions were drafted. (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
arXiv 2302.01318, theorem 1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specdec.batch import Row
from specdec.kernels.accept import DRAFT_POSITIONS, reject, sample
from specdec.sampling.choice import Choice
from specdec.sampling.sampler import choose, process, streams
from specdec.staging import read, to_device

Ids = tuple[int, ...]


@torch.inference_mode()
def draw(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], Tensor]:
    """Draw drafts from the scores' law after each request's processors, and say that law.

    logits   [L, V]
    returns  token ids [L] and laws [L, V]; of a greedy request the law is all at one token
    """
    if not choices:
        return [], logits[:0]
    scores = process(logits.to(torch.promote_types(logits.dtype, torch.float32)).clone(), choices)
    seeds, positions = streams(choices, logits.device)
    token_ids, is_finite = sample(scores, seeds, positions + DRAFT_POSITIONS, torch.ones_like(scores[:, 0]))
    is_greedy = torch.tensor([c.request.params.is_greedy for c in choices], device=logits.device)
    if is_greedy.any():
        token_ids = torch.where(is_greedy, torch.tensor(choose(logits, choices)[0], device=logits.device), token_ids)
    certain = torch.nn.functional.one_hot(token_ids, logits.shape[1]).to(scores.dtype)
    laws = torch.where((is_greedy | ~is_finite)[:, None], certain, torch.softmax(scores, dim=1))
    return token_ids.tolist(), laws


@dataclass(frozen=True, slots=True)
class Case:
    """One row to judge.

    first   place of its first choice
    laws    [m, V] of its n drafts; m <= n: the drafts beyond are certain; m = n + 1: one more was drawn and counts
            as rejected
    """

    row: Row
    first: int
    laws: Tensor


@torch.inference_mode()
def judge(cases: Sequence[Case], logits: Tensor, choices: Sequence[Choice]) -> list[Ids]:
    """The accepted drafts of every case and the token behind them.

    logits    [L, V]   of the whole batch, with one choice each

    Draft x is accepted with probability min(1, p(x) / q(x)); behind the first that is not, a token is drawn from
    the residual max(p - q, 0) by the target's own noise, and behind the last from p, which is the target's own choice.
    """
    device = logits.device
    places = [case.first + j for case in cases for j in range(case.row.num_choices)]
    own = [choices[place] for place in places]
    taken = logits.index_select(0, to_device(places, device, torch.int64))
    scores = process(taken.to(torch.promote_types(taken.dtype, torch.float32)), own)
    drafts = [token_id for case in cases for token_id in (*case.row.draft_token_ids, 0)]
    bounds = [0, *accumulate(case.row.num_choices for case in cases)]
    judged = reject(
        scores,
        _draft_laws(cases, bounds, scores),
        *streams(own, device),
        to_device(drafts, device, torch.int64),
        to_device(bounds, device, torch.int32),
    )
    kept, next_ids = read(judged.num_accepted, judged.next_ids)
    return [
        (*case.row.draft_token_ids[:num], next_id) for case, num, next_id in zip(cases, kept, next_ids, strict=True)
    ]


def _draft_laws(cases: Sequence[Case], bounds: Sequence[int], scores: Tensor) -> Tensor:
    """The law behind every row of scores [L, V]: all at its draft where that is certain, zeros where nothing was drawn.

    A draft's vocabulary may be smaller.
    """
    told = [first + j for case, first in zip(cases, bounds, strict=False) for j in range(len(case.laws))]
    certain = [
        (first + j, token_id)
        for case, first in zip(cases, bounds, strict=False)
        for j, token_id in enumerate(case.row.draft_token_ids)
        if j >= len(case.laws)
    ]
    laws = torch.cat([case.laws for case in cases]).to(scores)
    q = torch.zeros_like(scores)
    q[to_device(told, scores.device, torch.int64), : laws.shape[1]] = laws
    if certain:
        rows, ids = zip(*certain, strict=True)
        q[to_device(rows, scores.device, torch.int64), to_device(ids, scores.device, torch.int64)] = 1.0
    return q
