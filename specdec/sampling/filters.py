"""Filters: min_p, top_k and top_p, without sorting the vocabulary.

They know scores and thresholds of the rows that ask for a filter; rows that do not ask never come here.
A row that top_k cuts is reduced to a shortlist of its likeliest tokens; the others are masked where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.nucleus import nucleus
from specdec.sampling.likeliest import Likeliest, at_least, group_maxima, kth_bound

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """What each row asks for, [R] each.

    top_k         V or more: no limit
    top_p         in (0, 1]; the smallest set of likeliest tokens whose mass reaches it
    min_p         tokens of this times the largest probability; 0: no limit
    temperature   at which the masses are measured; scores come undivided
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, scores: Tensor, rows: Sequence[tuple[int, float, float, float]]) -> Limits:
        """From (top_k, top_p, min_p, temperature) of each row; a top_k of 0 is no limit."""
        vocab_size = scores.shape[1]
        top_k = torch.tensor([min(k or vocab_size, vocab_size) for k, _, _, _ in rows], device=scores.device)
        rest = torch.tensor([row[1:] for row in rows], dtype=torch.float64, device=scores.device)
        return cls(top_k, rest[:, 0], rest[:, 1], rest[:, 2])


@dataclass(frozen=True, slots=True)
class Shortlist:
    """What the filters keep of each row: the first keep[i] of its likeliest tokens.

    keep   [R]
    """

    found: Likeliest
    keep: Tensor


def shortlist(scores: Tensor, limits: Limits) -> Shortlist:
    """Apply min_p, then top_k, then top_p; each sees the law that the one before it left.

    scores   [R, V]   float32 or float64, not divided by the temperature

    Ties at a limit of top_k or top_p go to the lower ids. The law is renormalised over the survivors of min_p and
    top_k, which are at hand; where neither cuts, all are, so a row that top_p alone cuts belongs to `nucleus`.
    (Nucleus: Holtzman et al. 2020, section 3.1. min_p: Nguyen et al. 2024, arXiv 2407.01082.)
    """
    maxima = group_maxima(scores)
    largest = maxima.amax(dim=1)
    floor = (largest.double() + limits.temperature * torch.log(limits.min_p)).to(scores.dtype)
    found = at_least(scores, maxima, torch.maximum(floor, kth_bound(scores, maxima, limits.top_k)))
    survivors = torch.minimum(found.counts, limits.top_k)
    weights = torch.exp((found.scores - largest[:, None]).div_(limits.temperature[:, None].to(scores.dtype)))
    sums = weights.cumsum(dim=1)  # in turn, so the padding behind a row adds nothing
    wanted = limits.top_p * sums.gather(1, (survivors - 1).clamp_min(0)[:, None])[:, 0].double()
    is_candidate = torch.arange(sums.shape[1], device=sums.device) < survivors[:, None]
    reached = ((sums < wanted[:, None]) & is_candidate).sum(dim=1)
    keep = torch.where(limits.top_p < 1, torch.minimum(reached + 1, survivors), survivors)
    return Shortlist(found, keep)


def mask(scores: Tensor, short: Shortlist) -> Tensor:
    """Scores where kept, -inf elsewhere, [R, V]; undivided as they came."""
    kept = torch.full_like(scores, _NEVER)
    inside = torch.arange(short.found.scores.shape[1], device=kept.device) < short.keep[:, None]
    where = torch.arange(len(kept), device=kept.device)[:, None].expand_as(short.found.ids)[inside]
    kept[where, short.found.ids[inside]] = short.found.scores[inside]
    return kept


def keep(scores: Tensor, limits: Limits) -> Tensor:
    """Scores where the filters keep them, -inf elsewhere: [R, V] -> [R, V], undivided as they came."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    kept = nucleus(scores, limits.temperature, limits.top_p, limits.min_p)
    rows = torch.nonzero(limits.top_k < scores.shape[1])[:, 0]
    if len(rows):
        own = Limits(limits.top_k[rows], limits.top_p[rows], limits.min_p[rows], limits.temperature[rows])
        kept[rows] = mask(scores[rows], shortlist(scores[rows], own))
    return kept
