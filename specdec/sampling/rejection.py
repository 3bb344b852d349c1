"""Classical rejection sampling: drafts drawn from a known law, judged so that the target's law comes out.

It knows the laws of drafts and targets, each after all processors of its request, and three independent noises
of a request: the target's own, the draft's, and the coins. It shares no noise between draft and target, so the
output depends on which positions were drafted. (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, algorithm 1;
Chen et al. 2023, arXiv 2302.01318, theorem 1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from specdec.batch import Row
from specdec.kernels.accept import noise, noise_of, sample
from specdec.sampling.choice import Choice
from specdec.sampling.sampler import choose, process, streams

Ids = tuple[int, ...]
DRAFT, COIN = 1, 2
"""Streams of noise; 0 is the target's own and draws residuals too."""


@torch.inference_mode()
def draw(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], Tensor]:
    """Draw drafts from the scores' law after each request's processors, and say that law.

    logits   [L, V]
    returns  token ids [L] and laws [L, V]; of a greedy request the law is all at one token
    """
    if not choices:
        return [], logits[:0]
    own = [replace(choice, stream=DRAFT) for choice in choices]
    scores = process(logits.to(torch.promote_types(logits.dtype, torch.float32)).clone(), own)
    seeds, positions = streams(own, logits.device)
    token_ids, is_finite = sample(scores, seeds, positions, torch.ones_like(scores[:, 0]))
    is_greedy = torch.tensor([c.request.params.is_greedy for c in own], device=logits.device)
    if is_greedy.any():
        token_ids = torch.where(is_greedy, torch.tensor(choose(logits, own)[0], device=logits.device), token_ids)
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
def judge(cases: Sequence[Case], logits: Tensor, choices: Sequence[Choice], chosen: Sequence[int]) -> list[Ids]:
    """The accepted drafts of every case and the token behind them.

    logits    [L, V]   of the whole batch, with one choice each
    chosen    [L]      the target's own choices by its own noise

    Draft x is accepted with probability min(1, p(x) / q(x)); behind the first that is not, a token is drawn from
    the residual max(p - q, 0). For a certain draft both are what comparing with the target's own choice does.
    """
    places = [case.first + j for case in cases for j in range(len(case.laws))]
    starts = [0, *accumulate(len(case.laws) for case in cases)]
    own = [choices[place] for place in places]
    p, q = _target_laws(logits, places, own), _draft_laws(cases, logits)
    is_agreed = _is_agreed(cases, p, q, own)
    ends = [_agreed(case, is_agreed[start:], chosen) for case, start in zip(cases, starts, strict=False)]
    owed = [start + end for case, start, end in zip(cases, starts, ends, strict=False) if end < len(case.laws)]
    residuals = iter(_residuals(p, q, owed, own))
    return [
        (*case.row.draft_token_ids[:end], next(residuals) if end < len(case.laws) else chosen[case.first + end])
        for case, end in zip(cases, ends, strict=True)
    ]


def _target_laws(logits: Tensor, places: Sequence[int], own: Sequence[Choice]) -> Tensor:
    index = torch.tensor(places, dtype=torch.int64, device=logits.device)
    taken = logits.index_select(0, index)
    return torch.softmax(process(taken.to(torch.promote_types(taken.dtype, torch.float32)), own), dim=1)


def _draft_laws(cases: Sequence[Case], logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return _widened(torch.cat([case.laws for case in cases]).to(logits.device, wide), logits.shape[1])


def _is_agreed(cases: Sequence[Case], p: Tensor, q: Tensor, own: Sequence[Choice]) -> list[bool]:
    """For every law whether the draft that was drawn from it is accepted; a draft that could not ride never is."""
    drafts = [(*case.row.draft_token_ids, -1)[j] for case in cases for j in range(len(case.laws))]
    index = torch.tensor(drafts, dtype=torch.int64, device=p.device)[:, None]
    safe = index.clamp_min(0)
    agreed = _coins(own, p.device) * q.gather(1, safe)[:, 0] < p.gather(1, safe)[:, 0]
    return (agreed & (index[:, 0] >= 0)).tolist()


def _agreed(case: Case, is_agreed: Sequence[bool], chosen: Sequence[int]) -> int:
    """How many drafts of a row are accepted."""
    for j, draft in enumerate(case.row.draft_token_ids):
        if not (is_agreed[j] if j < len(case.laws) else chosen[case.first + j] == draft):
            return j
    return len(case.row.draft_token_ids)


def _widened(laws: Tensor, vocab_size: int) -> Tensor:
    """A draft's vocabulary may be smaller."""
    return torch.nn.functional.pad(laws, (0, vocab_size - laws.shape[1])) if laws.shape[1] < vocab_size else laws


def _coins(choices: Sequence[Choice], device: torch.device) -> Tensor:
    """Uniform numbers in (0, 1), one a choice, [R]: what makes Gumbel noise of the coins' stream."""
    seeds, positions = streams([replace(choice, stream=COIN) for choice in choices], device)
    g = noise_of(seeds, positions, torch.zeros_like(seeds), torch.float64)
    return -torch.expm1(-torch.exp(-g))


def _residuals(p: Tensor, q: Tensor, rows: Sequence[int], own: Sequence[Choice]) -> list[int]:
    """Draw from max(p - q, 0) by the target's own noise, which decided nothing else at these places."""
    if not rows:
        return []
    index = torch.tensor(rows, dtype=torch.int64, device=p.device)
    target = p[index]
    rest = (target - q[index]).clamp_min_(0)
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, target)  # p equals q up to rounding
    seeds, positions = streams([own[i] for i in rows], p.device)
    token_ids: list[int] = (torch.log(rest) + noise(seeds, positions, p.shape[1], p.dtype)).argmax(dim=1).tolist()
    return token_ids
